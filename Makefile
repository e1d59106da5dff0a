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

.PHONY: demo test test-clients test-versions field-guards campaign kill9 bench docs release-check lint types clean

demo: $(INSTALLED)
	$(BIN)/python -m engine $(if $(DEVICE),--device $(DEVICE)) --traces demo-output/traces

# Two processes, a file in one of them; what goes by the clock alone, after that. On a device that is
# no simulation one process, since its memory is counted.
test: $(INSTALLED) lint types
	$(BIN)/python -m pytest -m "not timed" $(if $(DEVICE),--placement-device $(DEVICE),-n 2 --dist loadfile)
	$(BIN)/python -m pytest -m timed $(if $(DEVICE),--placement-device $(DEVICE))

# Beside verl, where it is installed; see docs/figures.md.
bench: $(CLIENTS)/.installed
	PYTHONPATH=tests $(CLIENTS)/bin/python -m bench $(if $(DEVICE),--device $(DEVICE))
	$(CLIENTS)/bin/python tests/bench/million.py
	$(CLIENTS)/bin/python tests/bench/checkpoint.py

# Other people's libraries, in an environment of their own.
test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest tests/clients --confcutdir tests \
		$(if $(DEVICE),--placement-device $(DEVICE),-n 2 --dist loadfile)

# Other Pythons and torches, as in: make test-versions VERSIONS="3.12-2.13.0 3.13-2.14.1". What
# constraints.txt pins was tested together with one torch, so here pip chooses the rest.
test-versions: $(addprefix test-version-,$(VERSIONS))
	@test -n "$(VERSIONS)" || { echo 'say which: VERSIONS="PYTHON-TORCH ..."'; exit 2; }

test-version-%:
	python$(firstword $(subst -, ,$*)) -m venv .venv-versions/$*
	.venv-versions/$*/bin/pip install --quiet 'torch==$(lastword $(subst -, ,$*))' --editable '.[dev]'
	.venv-versions/$*/bin/python -m pytest $(TESTS)

# Take each field test's guard away; the test must fail then.
field-guards: $(INSTALLED)
	$(BIN)/python -m pytest tests/field --without-guards

# Let each allocation, copy, collective and file operation fail once, on one rank and on two.
campaign: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_failure_campaign.py --every-point

# Kill -9 at 200 random moments of a save: a whole checkpoint must be left, and none be lost.
kill9: $(INSTALLED)
	$(BIN)/python tests/checkpoint/kill9.py

# What the pages show is run by make test; here they are built, and a warning is an error.
docs: $(INSTALLED)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs build/docs
	@echo build/docs/index.html

# Wheel and sdist, each installed and used in an environment of its own, outside the checkout.
release-check: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/python tests/release/check.py dist

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(CLIENTS) .venv-versions build dist docs/generated demo-output .mypy_cache .pytest_cache .ruff_cache

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
