# `make demo` and `make test` need Python 3.11 and nothing else: each sets up .venv first (once, about five minutes).
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: help setup demo test check format clean

help:
	@echo "make demo    record a reference, a floor and two builds, and judge both (under 5 minutes)"
	@echo "make test    run the tests (PYTEST_ARGS='-m \"not engine\"' for the quick ones)"
	@echo "make check   format, lint and strict types"
	@echo "make format  rewrite the files as 'check' wants them"
	@echo "make setup   fill .venv with what constraints.txt pins; does nothing when it is up to date"
	@echo "make clean   remove .venv, caches and the demo's folder"

setup:
	@PYTHON="$(PYTHON)" bash scripts/setup.sh

demo: setup
	@$(BIN)/logitgate demo $(DEMO_ARGS)

test: setup
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis logitgate-demo build dist
