# Each target sets up what it needs and skips what is done. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
READY := $(VENV)/.ready-$(shell cat pyproject.toml constraints/*.txt | cksum | cut -d' ' -f1)
CLI := $(BIN)/eagle3-console
# Workers for the tests that start no server; the others run one at a time.
JOBS ?= auto

.PHONY: help setup demo demo-data test test-fast test-long lint format clean-demo

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## the environment in .venv (CPU torch, SGLang 0.5.14, this project)

$(READY):
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$$(grep '^torch==' constraints/cpu.txt)"
	$(PIP) install --quiet --constraint constraints/cpu.txt --requirement constraints/engine.txt --editable '.[host,dev]'
	$(PIP) install --quiet --no-deps --requirement constraints/no-deps.txt
	rm -f $(VENV)/.ready-*
	touch $@

demo: $(READY) ## the whole pipeline on this machine, about 10 minutes on 2 cores
	$(CLI) demo

demo-data: $(READY) ## make the demo's own answers anew with the real server, about 7 minutes (committed: rarely needed)
	$(BIN)/python -m backend.data.demo .demo
	$(BIN)/python -m backend.stages.regenerate .demo

test: $(READY) ## every test that CI runs, under 40 minutes on 2 cores
	$(BIN)/pytest -n $(JOBS) -m 'not sglang and not long'
	$(BIN)/pytest -m 'sglang and not long'

test-fast: $(READY) ## the tests that start nothing heavy, under a minute
	$(BIN)/pytest -n $(JOBS) -m 'not slow and not sglang and not long'

test-long: $(READY) ## the full counts of the fault and kill tests
	$(BIN)/pytest -m long

lint: $(READY) ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean-demo: ## remove the demo's folder; refuses while one of its runs is alive
	$(CLI) --profile demo status --idle
	rm -rf .demo
