# Every way to run something in this repository. `make` alone lists them.
# CI calls the same targets; what a target needs beyond Python 3.11 it installs into ./.venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV ?= .venv
PYTHON ?=
export VENV PYTHON
# The environment is ./.venv and nothing else: what the caller's shell has activated or put on PYTHONPATH stays out.
# Nor may each of the hundreds of processes that tests start compile every module again, torch's included.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

bin := "$(VENV)/bin"
# What a pytest call is narrowed to: make test T="tests/unit -k barrier"
T ?=
# How many workers share the tests: several for all of them, which mostly wait; none for a few, which start sooner.
J ?= $(if $(strip $(T)),0,3)
L ?=

.PHONY: help env demo test lint format bench sim lab soak constraints wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

env: ## make ./.venv, or bring it up to date (the others do this first)
	@tools/environment.sh

demo: env ## run the two-node DDP script on a deployment of its own
	@tools/demo.sh

lint: env ## formatting, lint, types, import layers
	$(bin)/python -m ruff check .
	$(bin)/python -m ruff format --check .
	$(bin)/python -m mypy
	$(bin)/lint-imports --no-logo

test: lint ## lint, then every test; T="tests/unit -k barrier" narrows it, J=2 is for two workers
	$(bin)/python -m pytest -n $(J) $(T)

format: env ## format and fix what can be fixed
	$(bin)/python -m ruff check --fix .
	$(bin)/python -m ruff format .

bench: env ## the figures, ours beside theirs, as one table; B="--only store --quick" narrows it
	$(bin)/python -m tests.bench $(B)

wheel: env ## build the wheel into ./dist
	$(bin)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

clean: ## remove what runs and tools left here; the environment stays
	rm -rf .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	find . -path "./$(VENV)" -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

sim: env ## a million simulated worlds, for a night; S="--seeds 100000" fewer, S="--seed 4711" one of them step by step
	$(bin)/python -m tests.sim $(S)

lab: env ## hosts as network namespaces, also the tests that take too long for every run (as root); L="-k direct" narrows it to the mesh's direct path
	LAB=all $(bin)/python -m pytest tests/lab $(L)

soak: env ## every test again and again with other seeds; SOAK_MINUTES=30, T narrows it
	@tools/soak.sh $(T)

constraints: env ## write constraints.txt from what ./.venv holds
	tools/constraints.sh
