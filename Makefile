# `make perf` and `make test` are complete by themselves: they make .venv, build and install the package, and run.
# Needed beforehand: Python 3.11 or newer with venv and headers, and a C++20 compiler
# (Debian, Ubuntu: apt install python3-venv python3-dev g++).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PERF ?= allreduce -n 2 -b 8 -e 64M
TESTS ?=
BENCH ?= --write-docs
SANITIZERS := address,undefined thread
NATIVE_TESTS := hetcoll_kernels_test hetcoll_engine_test hetcoll_verbs_test

CPUS := $(shell nproc 2>/dev/null || echo 2)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(CPUS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES := pyproject.toml $(shell find src native -type f -not -name '*.so' -not -path '*/__pycache__/*')
NATIVE_FILES := $(shell find native benchmarks src tests -name '*.cc' -o -name '*.h' -o -name '*.c')
PIP := $(BIN)/python -m pip install -q
# The requirements of an extra in pyproject.toml, but for the package itself.
EXTRA = $(BIN)/python -c "import tomllib; \
	print(*(r for r in tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'] \
	if not r.startswith('hetcoll')), sep='\n')" | $(PIP) -r /dev/stdin

.PHONY: help perf test jax vendors launchers lint types format sanitize sanitizers bench instructions clean tools

help:
	@echo "make perf          measure all-reduce with two ranks here (PERF=\"...\": other arguments of hetcoll perf)"
	@echo "make test          run the tests (TESTS=\"...\": arguments for pytest)"
	@echo "make launchers     install Open MPI, MPICH, Intel MPI and PyTorch for the tests that run them"
	@echo "make jax           install JAX for the tests that need it"
	@echo "make vendors       install cuda-python, NVRTC and hip-python for the tests that need them (no GPU)"
	@echo "make lint types    ruff, clang-format; mypy, import contracts"
	@echo "make sanitize      the native tests under ASan, UBSan and TSan"
	@echo "make bench         against Gloo, Open MPI, MPICH, Intel MPI; writes docs/benchmarks.md (BENCH=\"...\")"
	@echo "make instructions  count instructions with callgrind, compare with benchmarks/instructions.json"
	@echo "make format clean"

perf: $(VENV)/installed
	$(BIN)/hetcoll perf $(PERF)

test: $(VENV)/installed $(VENV)/test
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_FILES)

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE_FILES)

types: $(VENV)/installed $(VENV)/test $(VENV)/dev
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

# The tests of one variant mostly wait or use one processor: they run beside those of the other.
sanitize: sanitizers
	+$(MAKE) -j $(words $(SANITIZERS)) --output-sync=target $(SANITIZERS:%=sanitize-run-%)

sanitizers: $(SANITIZERS:%=sanitize-build-%)

sanitize-build-%: $(VENV)/dev
	$(BIN)/cmake -S native -B build/$* -DHETCOLL_BUILD_TESTS=ON -DHETCOLL_SANITIZE=$* -DHETCOLL_WERROR=ON \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build build/$* --target $(NATIVE_TESTS)

sanitize-run-%:
	set -e; for name in $(NATIVE_TESTS); do \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	    $$(find build/$* -type f -name $$name -perm -u+x); \
	done

bench: $(VENV)/installed
	$(BIN)/python benchmarks/peers.py $(BENCH)

launchers: $(VENV)/installed
	$(BIN)/python benchmarks/peers.py --install

instructions: $(VENV)/installed
	$(BIN)/python benchmarks/instructions.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +

tools:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null \
	  || { echo "$(PYTHON): Python 3.11 or newer is needed (make PYTHON=python3.12 picks another)"; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null \
	  || { echo "$(PYTHON) has no venv: apt install python3-venv"; exit 1; }
	@$(PYTHON) -c "import os, sys, sysconfig; \
	  sys.exit(not os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))" \
	  || { echo "$(PYTHON) has no headers: apt install python3-dev"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null \
	  || { echo "$${CXX:-g++} is missing, a C++20 compiler is needed: apt install g++"; exit 1; }

$(VENV)/made: | tools
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/made $(SOURCES) | tools
	$(PIP) .
	touch $@

$(VENV)/test: $(VENV)/made pyproject.toml
	$(call EXTRA,test)
	touch $@

jax: $(VENV)/jax

$(VENV)/jax: $(VENV)/made pyproject.toml
	$(call EXTRA,jax)
	touch $@

# cuda-python, NVRTC and both lines of hip-python: tests of GPU code skip without them. nccl4py comes without NCCL, which
# is large and does nothing without a GPU.
vendors: $(VENV)/vendors

$(VENV)/vendors: $(VENV)/made pyproject.toml
	$(call EXTRA,vendors)
	$(PIP) --no-deps nccl4py
	$(PIP) --no-deps --upgrade --target $(VENV)/hip7 'hip-python<10'
	touch $@

$(VENV)/dev: $(VENV)/made pyproject.toml
	$(call EXTRA,dev)
	$(PIP) cmake
	touch $@
