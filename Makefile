# Everything from a fresh clone, with Python 3.11 or newer, a C++ compiler and make:
#   make demo   environment, build, model, and four answers side by side
#   make test   environment, build, and every check there is
# `make help` lists the rest.  What is up to date is not done again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

# The interpreter that the environment is made with: the first one here that is new enough.
PYTHON = $(shell for name in python3.11 python3 python3.12 python3.13 python3.14; do \
    if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$name; break; fi; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
EXAMPLES ?= 20000
PYTEST_ARGS ?=
BENCH_ARGS ?=

native_files := $(shell find native -name '*.[ch]' -o -name '*.cpp' -o -name '*.cmake' -o -name 'CMakeLists.txt' \
    -o -name 'llama_source.toml' -o -name 'fetch_llama.py' -o -name 'pip_build.py')
python_files := $(shell find engine plugins native/laneway_native -name '*.py' -o -name '*.pyi' -o -name 'py.typed')

.PHONY: help env build wheel model lint types unit test test-portable demo stateful long bench format clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# --- environment and build ---

env: $(VENV)/.stamp-env ## the virtual environment .venv with build, test and lint tools (PYTHON=/path/to/python3)

$(VENV)/.stamp-env: pyproject.toml
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
	    echo "laneway: no Python 3.11 or newer was found; install it (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev) or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	elif ! $(PY) -c 'import pip' >/dev/null 2>&1; then \
	    echo "laneway: making $(VENV) with $$python"; \
	    $$python -m venv --clear $(VENV) || { echo "laneway: $$python cannot make a virtual environment; install its venv module (Debian, Ubuntu: apt-get install python3-venv) or name another: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	fi
	@echo "laneway: installing build, test and lint tools"
	@{ $(PIP) install --quiet --upgrade 'pip>=25.1' && $(PIP) install --quiet --group dev; } || { \
	    echo "laneway: the tools could not be installed; check the network and pip's settings, then: make env" >&2; exit 1; }
	@touch $@

build: build/.stamp-build ## an editable install; after a change of C or C++ run it again

build/.stamp-build: $(VENV)/.stamp-env $(native_files) build/inputs.txt
	@$(PY) native/pip_build.py editable
	@touch $@

# Python files are picked up as they are, but a new one needs another install, and so does another source of llama.cpp.
build/inputs.txt: FORCE
	@mkdir -p build
	@printf '%s\n' $(sort $(python_files)) "llama=$${LANEWAY_LLAMA_SOURCE-}" "cmake=$${CMAKE_ARGS-}" > $@.new
	@if cmp -s $@ $@.new; then rm $@.new; else mv $@.new $@; fi

.PHONY: FORCE
FORCE:

wheel: build/.stamp-wheel ## a wheel in build/dist, from the same CMake build folder

build/.stamp-wheel: build/.stamp-build $(python_files) README.md LICENSE
	@$(PY) native/pip_build.py wheel
	@touch $@

model: build ## the model that the demo and some tests run on
	@$(VENV)/bin/laneway pull smollm2

# --- checks ---

lint: env ## ruff: rules and format
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

format: env ## let ruff mend what it can
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

types: build ## mypy, strict
	@$(VENV)/bin/mypy

unit: build ## the quick tests
	@$(PY) -m pytest -m 'not slow and not real_model' $(PYTEST_ARGS)

test: lint build types wheel model ## everything: build, wheel, lint, types, all tests; the native ones for AVX2 too
	@$(PY) -m pytest $(PYTEST_ARGS)
	@$(PY) -m tests.portable avx2 --quick --pytest='$(PYTEST_ARGS)'

test-portable: build model ## the native tests on builds for older processors: AVX2 only, SSE4.2 only
	@$(PY) -m tests.portable --pytest='$(PYTEST_ARGS)'

long: build model ## the tests that take long: soaks, trainings of a real model
	@$(PY) -m pytest -m long $(PYTEST_ARGS)

stateful: build ## the state machines for long: EXAMPLES=20000
	@LANEWAY_HYPOTHESIS_PROFILE=long LANEWAY_EXAMPLES=$(EXAMPLES) $(PY) -m pytest tests/stateful $(PYTEST_ARGS)

# --- use ---

demo: model ## the main job: four answers side by side, one cancelled, a fifth in its place
	@$(VENV)/bin/laneway demo

bench: model ## ours against a bare C loop and llama-batched-bench; see benchmarks/
	@echo "laneway: building the programs to compare with (the first time takes some minutes)"
	@folder=$$(ls -d build/cp*-*/ | head -n 1); \
	$(VENV)/bin/cmake -DLANEWAY_BUILD_BENCH=ON "$$folder" >build/bench.log && \
	$(VENV)/bin/cmake --build "$$folder" --target laneway-bench >>build/bench.log || { \
	    echo "laneway: they could not be built; see build/bench.log" >&2; exit 1; }
	@$(PY) -m benchmarks $(BENCH_ARGS)

clean: ## remove what was built
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis

distclean: clean ## remove the environment too
	rm -rf $(VENV)
