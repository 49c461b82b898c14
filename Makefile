# make demo   set up, then train a small model to use a tool, and show it
# make algorithms   set up, then a short run of each algorithm on the demo's problems
# make test   set up, then lint, type-check and test
# make lock   resolve requirements/cpu.in anew into requirements/cpu.txt

PYTHON ?= python3.11
SEED ?= 0
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip
# Where CPU torch is found when the machine's own pip configuration does not know it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: setup demo algorithms test lint lock clean

setup: $(STAMP)

$(STAMP): requirements/cpu.txt
	@command -v $(PYTHON) > /dev/null || { echo "turnwise needs $(PYTHON) on the PATH (or: make PYTHON=/path/to/python3.11)"; exit 2; }
	@echo "setting up .venv (pinned requirements, about 3 GB unpacked) ..."
	@$(PYTHON) -m venv --clear .venv
	@$(PIP) download -qq --no-deps -d .venv/torch "$$(grep '^torch==' requirements/cpu.txt)" 2> /dev/null \
	  || $(PIP) download -qq --no-deps -d .venv/torch --index-url $(TORCH_INDEX) "$$(grep '^torch==' requirements/cpu.txt)"
	@$(PIP) install -qq --no-deps --find-links .venv/torch -r requirements/cpu.txt
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@rm -rf .venv/torch
	@touch $@

demo: setup
	$(BIN)/python -m examples.calculator.demo --seed $(SEED)

algorithms: setup
	$(BIN)/python -m examples.calculator.algorithms

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(BIN)/python -m pytest

lock:
	$(PIP) install -q --dry-run --ignore-installed --report - -r requirements/cpu.in | $(PYTHON) requirements/lock.py > requirements/cpu.txt.new
	mv requirements/cpu.txt.new requirements/cpu.txt

clean:
	rm -rf .venv runs examples/calculator/build
