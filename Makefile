# One environment for everything, in .venv. DEVICE chooses where demo and tests run: empty for the
# accelerator that torch finds, else the simulated one; or a name (cuda, sim).
PYTHON ?= python3
DEVICE ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CLIENTS := .venv-clients

# Kernels of small tensors gain nothing from threads, and ranks would fight for the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-clients field-guards kill9 bench lint types clean

demo: $(INSTALLED)
	$(BIN)/python -m engine $(if $(DEVICE),--device $(DEVICE)) --traces demo-output/traces

test: $(INSTALLED) lint types
	$(BIN)/python -m pytest $(if $(DEVICE),--placement-device $(DEVICE))

# Beside verl, where it is installed; see docs/figures.md.
bench: $(CLIENTS)/.installed
	PYTHONPATH=tests $(CLIENTS)/bin/python -m bench $(if $(DEVICE),--device $(DEVICE))
	$(CLIENTS)/bin/python tests/bench/million.py
	$(CLIENTS)/bin/python tests/bench/checkpoint.py

# Other people's libraries, in an environment of their own.
test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest tests/clients $(if $(DEVICE),--placement-device $(DEVICE))

# Take each field test's guard away; the test must fail then.
field-guards: $(INSTALLED)
	$(BIN)/python -m pytest tests/field --without-guards

# Kill -9 at 200 random moments of a save: a whole checkpoint must be left, and none be lost.
kill9: $(INSTALLED)
	$(BIN)/python tests/checkpoint/kill9.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(CLIENTS) demo-output .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(CLIENTS)/.installed: pyproject.toml requirements-clients.txt constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --constraint constraints-clients.txt --editable '.[pretrained,testing]' \
		--requirement requirements-clients.txt
	$(CLIENTS)/bin/pip install --quiet --constraint constraints-clients.txt --no-deps verl
	touch $@
