# One environment for everything, in .venv. DEVICE chooses where demo and tests run: empty for the
# accelerator that torch finds, else the simulated one; or a name (cuda, sim).
PYTHON ?= python3
DEVICE ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Kernels of small tensors gain nothing from threads, and ranks would fight for the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test bench lint types clean

demo: $(INSTALLED)
	$(BIN)/python -m engine $(if $(DEVICE),--device $(DEVICE)) --traces demo-output/traces

test: $(INSTALLED) lint types
	$(BIN)/python -m pytest $(if $(DEVICE),--placement-device $(DEVICE))

bench: $(INSTALLED)
	$(BIN)/python tests/bench/idle.py
	$(BIN)/python tests/bench/million.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo-output .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
