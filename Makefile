# On a fresh machine `make demo` and `make test` each set up what they need: a virtual environment in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export NIXL_LOG_LEVEL ?= ERROR

.PHONY: help setup demo test test-all lint format proto bench clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install the development environment into .venv

$(READY): pyproject.toml
	@echo "setting up $(VENV): about two minutes on a fresh machine"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(READY) ## two engines of different shape, their daemons and a proxy; every token compared
	@$(BIN)/kvferry demo

test: $(READY) ## the tests, without the slow ones
	@$(BIN)/python -m pytest -m "not slow"

test-all: $(READY) ## every test that this machine can run
	@$(BIN)/python -m pytest

lint: $(READY) ## format check, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: $(READY) ## generate clients/kvferry/v1 from proto/
	@$(BIN)/python tests/generate_stubs.py clients

bench: $(READY) ## the benchmarks of docs/benchmarks.md
	@$(BIN)/kvferry bench

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
