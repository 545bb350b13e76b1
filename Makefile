# Everything a clone needs; `make help` lists the targets. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*.cpp csrc/*.h)
NATIVE := $(wildcard tests/native/*.cpp)
SECONDS ?= 3600
TORCH := $(shell grep -o 'torch==[0-9.]*' pyproject.toml)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train build test test-unit test-integration sanitize stress lint format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

train: build ## train the example on NVMe, then resume it in a second process; ARGS="--parameters 100M"
	$(BIN)/python examples/train_lm.py $(ARGS)

build: $(VENV)/.built ## make the virtual environment and build the extension

test: test-unit test-integration ## everything that this machine can test

test-unit: build ## the tests that need no DeepSpeed
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-integration: build ## the tests that train
	$(BIN)/python -m pytest tests/integration $(ARGS)

sanitize: ## the C++ core under thread, address and undefined-behaviour sanitizers, in short
	tests/native/sanitize 10

stress: build ## the same for SECONDS (an hour), then thousands of random scripts against a plain file
	tests/native/sanitize $(SECONDS)
	$(BIN)/python -m pytest -m slow tests/unit/test_io_properties.py $(ARGS)

lint: $(VENV)/.installed ## ruff, mypy, clang-format; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) $(NATIVE)

format: $(VENV)/.installed ## write the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES) $(NATIVE)

clean: ## remove what was built and what runs left; the virtual environment stays
	rm -rf build dist runs *.egg-info offload/*.so $(VENV)/.built
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find offload tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.built: $(VENV)/.installed $(SOURCES) setup.py
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# torch stands first and pinned, so that nothing below pulls another one
$(VENV)/.installed: pyproject.toml setup.py | $(VENV)/.created
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet 'setuptools>=68' wheel 'pybind11>=2.11'
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.created:
	@PYTHON='$(PYTHON)' .ci/prepare_machine
	$(PYTHON) -m venv $(VENV)
	@touch $@
