# Every target runs in .venv, and makes it first where it is missing or older than what it was made from.
# pip is configured by its own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...), which are passed on untouched.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm train test endurance ranks vllm hunt simulation proofs presets ci lint format types bench docs

# The first Python of at least 3.11; set PYTHON to choose another.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
READY := .venv/.ready
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
SEED ?= 1
SEEDS ?= 0..999
# Processes that run the tests: two share a machine's cores well, and more would make waits with deadlines late.
WORKERS ?= 2

# The top folder must not be on sys.path: its `agents`, `replay` and `tools` are `asyncrl.agents`, and so on.
export PYTHONSAFEPATH := 1
# A hub id that is not on this disk fails at once instead of after minutes of retries.
export HF_HUB_OFFLINE := 1
# Small models are fastest with one thread.
export OMP_NUM_THREADS ?= 1

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1 \t/p' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything pinned in constraints.txt

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; set PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "setup: installing into .venv with $(PYTHON) (a minute or two; torch is most of it)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup-vllm: $(VLLM_READY) ## make .venv-vllm: the same, and vLLM's CPU build

# No resolver: see constraints-vllm.txt.
$(VLLM_READY): pyproject.toml constraints.txt constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; set PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "setup-vllm: installing vLLM's CPU build into .venv-vllm with $(PYTHON) (two minutes, 3 GB)"
	@$(PYTHON) -m venv .venv-vllm
	@$(VLLM_BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r constraints.txt -r constraints-vllm.txt
	@$(VLLM_BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

train: $(READY) ## the quick start: data, warm start, reinforcement learning (SEED=1)
	@$(BIN)/python -m asyncrl.examples.quickstart --seed $(SEED)

test: $(READY) ## run the tests
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

endurance: $(READY) ## the long tests; 500 processes killed in the middle of their puts, 60 trainers at any moment
	@$(BIN)/python -m pytest -q -m 'long and not ranks' -n $(WORKERS) --dist worksteal
	@$(BIN)/python tests/endurance/kill_cycles.py --cycles 500
	@$(BIN)/python tests/endurance/kill_training.py --kills 60 --seed $(SEED)

ranks: $(READY) ## tests of many rank processes; 20 trainers on two ranks, of which one is killed or stopped
	@$(BIN)/python -m pytest -q -m ranks
	@$(BIN)/python tests/endurance/kill_ranks.py --kills 20 --seed $(SEED)

vllm: $(VLLM_READY) ## tests against the real vLLM, embedded and as a server, in .venv-vllm
	@$(VLLM_BIN)/python -m pytest -q -m vllm -o asyncio_default_test_loop_scope=session

hunt: $(READY) ## simulated runs with all faults, until one shows a violation (SEEDS=0..999)
	@$(BIN)/asyncrl simulate configs/sim/reference.toml --seeds $(SEEDS) --faults all

simulation: $(READY) ## the long suites of the simulator: seeds, determinism, awaits, planted bugs
	@$(BIN)/asyncrl simulate configs/sim/smallest.toml --seeds 0..2999 --faults all
	@$(BIN)/asyncrl simulate configs/sim/reference.toml --seeds 0..999 --faults all
	@$(BIN)/asyncrl simulate configs/sim/async.toml --seeds 0..3999 --faults all
	@$(BIN)/python -m asyncrl.simulation.determinism configs/sim/reference.toml --seeds 200
	@$(BIN)/python -m asyncrl.simulation.determinism configs/sim/async.toml --seeds 40
	@$(BIN)/python -m asyncrl.simulation.await_coverage configs/sim/smallest.toml
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.simulation.planted.search

proofs: $(READY) ## search every state of the models of admission and recovery
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.models.run

presets: $(READY) ## 20 steps of each preset in configs/algorithms/, after `make train`: each must learn
	@$(BIN)/python benchmarks/presets.py

lint: $(READY) ## ruff, its formatter, and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

format: $(READY) ## let ruff mend and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(READY) ## mypy, strict
	@$(BIN)/mypy

docs: $(READY) ## write the generated pages of docs/
	@$(BIN)/python docs/generate.py

bench: $(READY) ## run every benchmark; each ends with one JSON object
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" --json; done

ci: ## what must pass before a change is merged
	@.ci/run
