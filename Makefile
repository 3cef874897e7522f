# Every target sets up its own .venv first; nothing is installed outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXAMPLES := $(VENV)/.examples
SHARED := --numprocesses auto --maxprocesses 4
SEARCHING := RRFP_HYPOTHESIS_PROFILE=all

.DEFAULT_GOAL := help

.PHONY: help demo test check test-all format lint clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(EXAMPLES): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@touch $@

demo: $(STAMP)  ## train a small GPT on real text, a process for each of four pipeline ranks
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 examples/train_gpt.py --steps 30

# Tests of one process share the cores; those that start processes have them to themselves.
test: $(STAMP)  ## the tests, the long ones sampled; five minutes on two cores
	$(BIN)/python -m pytest $(SHARED) -m "not slow and not multiprocess"
	$(BIN)/python -m pytest -m "not slow and multiprocess"

test-all: $(EXAMPLES)  ## what `make test` leaves out or samples: long cases, long searches
	$(SEARCHING) $(BIN)/python -m pytest $(SHARED) -m "(slow or property) and not multiprocess"
	$(SEARCHING) $(BIN)/python -m pytest -m "(slow or property) and multiprocess"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test  ## the whole gate: format, lint, types, walls, tests

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
