# Holdfast: set-up, demo, tests. Every target may be repeated; the environment is made once and kept in .venv.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt
BENCHMARKS := $(sort $(basename $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))) $(patsubst %/__main__.py,%,$(wildcard benchmarks/*/__main__.py)))
# TORCH= selects another build of torch: TORCH=torch is what pip's own index has.
export TORCH ?=
export OMP_NUM_THREADS ?= 1

.PHONY: help demo dev test drill lint format unit docs constraints bench images clean

help:  ## Say what can be made
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

demo: $(VENV)/.local  ## Install, then train, evaluate and register the quickstart model
	$(BIN)/holdfast run examples/quickstart.yaml

test: $(VENV)/.dev  ## Install, then check style, types, import rules and behaviour (not the slow tests)
	$(MAKE) --no-print-directory --jobs=2 lint unit

lint: $(VENV)/.dev  ## Check style, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests start many processes. Each would compile the library again where PYTHONDONTWRITEBYTECODE is set, and each of the
# four would rewrite the assertions of all tests, which takes 14 s. One collection does both for all of them.
unit: $(VENV)/.dev  ## Run the tests
	$(BIN)/python -m compileall -q holdfast
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -qq >/dev/null 2>&1 || true # the next line shows errors
	$(BIN)/pytest -n 4

drill: $(VENV)/.dev  ## Run what takes long: slow tests, faults again and again, sweeps
	failed=; $(BIN)/pytest -n 4 -m 'slow and not drill' --durations=25 || failed=1; \
	$(BIN)/pytest -n 3 -m drill --durations=25 -ra || failed=1; [ -z "$$failed" ]

docs: $(VENV)/.dev  ## Build the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

dev: $(VENV)/.dev  ## Install everything that a change needs; then .venv/bin/pre-commit install

constraints: $(VENV)/.dev  ## Write constraints.txt from what is installed, and the lock of the images from the index
	$(BIN)/python .ci/constraints.py --write
	$(BIN)/python .ci/lock.py --write

format: $(VENV)/.dev  ## Bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench  ## Run every benchmark and print its figures
	failed=; for name in $(subst /,.,$(BENCHMARKS)); do \
	  echo "== $$name"; $(BIN)/python -m "$$name" || failed="$$failed $$name"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

images:  ## Build the container images (images/build.sh says how to choose)
	images/build.sh

clean:  ## Remove the environment and what tools left behind
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info

# pip that comes with Python 3.11 resolves slowly, so it is renewed first. torch goes first too: everything else fits it.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25'
	touch $@

$(VENV)/.local: $(VENV)/.pip $(INPUTS)
	@echo "Installing into $(VENV), 3 GB, or 7 GB with CUDA: this takes minutes."
	images/torch.sh any $(PIP)
	$(PIP) -e '.[local]'
	touch $@

$(VENV)/.dev: $(VENV)/.pip $(INPUTS)
	@echo "Installing into $(VENV), 3 GB, or 7 GB with CUDA: this takes minutes."
	images/torch.sh any $(PIP)
	$(PIP) -e '.[dev]'
	touch $(VENV)/.local $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	touch $@
