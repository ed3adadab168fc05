# Needs only python3 (3.11 or newer) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TRITON := .venv-triton
PEERS := .venv-bench

.PHONY: help demo test test-slow test-triton test-avx512 check format docs bench clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 20

$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard src/forewarn/measure/engine/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "forewarn needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

demo: $(INSTALLED)  ## train a small GPT, break it on the way, and see the warning
	$(BIN)/forewarn demo

test: $(INSTALLED)  ## the test suite: under ten minutes on two cores
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: $(INSTALLED)  ## runs over many seeds
	$(BIN)/pytest -n 2 -m slow

$(TRITON)/.installed: pyproject.toml constraints.txt setup.py
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	$(TRITON)/bin/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt triton
	@touch $@

test-triton: $(TRITON)/.installed  ## the CUDA backend in Triton's interpreter, and compiled for GPUs that are not here
	TRITON_INTERPRET=1 $(TRITON)/bin/pytest tests/triton

test-avx512:  ## the AVX-512 code in an emulator, for machines that have none; says which Debian packages it needs
	$(PYTHON) tests/measure/engine/avx512/emulate.py

check: $(INSTALLED)  ## lint, format, types and tests: what CI runs, and more
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

format: $(INSTALLED)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## write the pages that are generated from the code
	$(BIN)/python -m forewarn.judge.documentation docs/rules
	$(BIN)/python -m forewarn.metrics docs/metrics.md

$(PEERS)/.installed: pyproject.toml constraints.txt setup.py $(wildcard src/forewarn/measure/engine/native/*.[ch])
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch]'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

bench: $(PEERS)/.installed  ## measure what all of it costs here, beside other tools; writes docs/overhead.md, half an hour
	for each in benchmarks/*.py; do $(PEERS)/bin/python $$each || exit 1; done
	$(PEERS)/bin/forewarn bench --workload all --rounds 3 --steps 4 --scaling --large --out docs/overhead.md

clean:  ## remove what was installed and built
	rm -rf $(VENV) $(TRITON) $(PEERS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
