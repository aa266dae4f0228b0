# Entry points for users and developers. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tools for the web page's JavaScript; without Node.js 20 they are left out, with a line that says so.
NODE_READY := $(shell node -e 'if (+process.versions.node.split(".")[0] >= 20) console.log("node_modules/.package-lock.json")' 2>/dev/null)
NO_NODE = echo "Node.js 20 or newer is not installed: the web page's JavaScript is not checked"
# The oldest supported (torch 2.11 brings it), what torch 2.13 brings, and the newest, each in a folder of its own.
TRITON := build/triton
PYTHON_OF_GPU ?= 3.12
# What the trainers, their peer (the Hugging Face Trainer) and the kernels' tests import besides torch,
# transformers and numpy.
GPU_WHEELS := pydantic pydantic-core annotated-types typing-inspection typing-extensions orjson filelock \
  nvidia-ml-py accelerate psutil pyyaml hypothesis sortedcontainers
PARALLEL := -n logical --maxprocesses 4 --dist worksteal
BENCHMARKS := 3
SMOKE := smoke
# Slow tests wait half of their time, for workers, browsers and Ray; with more processes Ray's start times out.
WAITING := -n 2 --durations=50 --durations-min=10
# Groups of workers and browsers are a file's: two processes that divide one start them twice.
BY_FILE := --dist loadfile --no-loadscope-reorder
FAST := 'not ray and not slow and not smoke and not thorough and not image'
FAST_RAY := 'ray and not slow and not smoke and not thorough'
# Test files that name a mark, so that a pass need not import all others (tests/conftest.py holds them to it).
naming = $$(grep -rl --include='test_*.py' 'mark\.$(1)' tests | sort)
# Several targets at once: what waits, for Ray most of all, leaves its CPU to the others. Each prints when it ends,
# and says how far it is to descriptor 9 meanwhile (tests/progress.py).
TOGETHER = exec 9>&1; $(MAKE) --no-print-directory --output-sync --jobs
# Targets that keep two cores busy: side by side, on a slow machine, their tests run into time limits.
ONE_BY_ONE = exec 9>&1; $(MAKE) --no-print-directory
KERNELS := kernels-tests kernels-v100 kernels-3.6.0 kernels-newest
# pytest rewrites the asserts of 350 files in each process, which takes 8 s unless what it wrote is kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo serve quick test test-all thorough coverage test-postgres image smoke kernels lint format docs bench mutation gpu-wheels clean test-fast test-fast-ray test-slow test-slow-ray $(KERNELS)

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## Create the virtual environment (other targets do this if needed)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); \
	  sys.exit(None if ok else "Python %d.%d: Stillhouse runs on 3.11 to 3.13; set PYTHON=python3.12" % sys.version_info[:2])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch is large: this takes minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY) ## Run a small sweep end to end and print the comparison (under 4 minutes)
	@$(BIN)/stillhouse demo

serve: $(READY) ## Start the service on this machine: database, Ray with dashboard, API, scheduler
	@$(BIN)/stillhouse up

quick: $(READY) ## Run the tests of every part that start and train nothing, few cases each (about 1 minute)
	@$(BIN)/python -m pytest -q $(PARALLEL) --quick --hypothesis-profile=quick

test: $(READY) ## Run the tests of every part, or of ROOM=service/driving (all: about 10 minutes)
ifdef ROOM
	@tests=$$($(BIN)/python -m tests.rooms $(ROOM)) || exit 1; for pass in "$(PARALLEL) -m $(FAST)" "-m $(FAST_RAY)"; do \
	  eval $(BIN)/python -m pytest $$pass $$tests; status=$$?; test $$status = 0 -o $$status = 5 || exit $$status; done
else
	@echo "tests of every part, those with Ray beside the others: about 10 minutes on two cores; progress twice a minute"
	@$(TOGETHER) test-fast test-fast-ray
endif

test-fast:
	@$(BIN)/python -m pytest --progress=$@ $(PARALLEL) -m $(FAST)

test-fast-ray:
	@$(BIN)/python -m pytest --progress=$@ -m $(FAST_RAY) $(call naming,ray)

test-all: test ## Run `make test`, then the slow tests and most benchmarks (40 minutes to an hour)
	@echo "slow tests, those with Ray, most benchmarks: 30 to 45 minutes on two cores"
	@$(ONE_BY_ONE) test-slow
	@$(ONE_BY_ONE) test-slow-ray
	@$(ONE_BY_ONE) smoke BENCHMARKS=2 SMOKE='"smoke and not thorough"'
	@echo "tests that measure their machine: about 1 minute"
	@$(BIN)/python -m pytest -m alone $(call naming,alone)

test-slow:
	@$(BIN)/python -m pytest --progress=$@ $(WAITING) $(BY_FILE) -m "slow and not ray and not smoke and not thorough" \
	  $(call naming,slow)

test-slow-ray:
	@$(BIN)/python -m pytest --progress=$@ --durations=20 \
	  -m "slow and ray and not smoke and not alone and not thorough" $(call naming,ray)

thorough: kernels ## Run variants that `make test-all` leaves out, and tests of properties with all examples
	@$(BIN)/python -m pytest $(WAITING) --dist worksteal --hypothesis-profile=many -m "(thorough or hypothesis) and not ray and not smoke"
	@$(BIN)/python -m pytest --durations=20 -m "thorough and (ray or smoke)"

coverage: $(READY) ## Show which lines of api and service `make quick` runs, by file; fails below the floor
	@$(BIN)/python -m coverage run -m pytest -q --quick --hypothesis-profile=quick
	@$(BIN)/python -m coverage report --skip-covered --sort=cover

test-postgres: $(READY) ## Run the tests that need PostgreSQL
	@$(BIN)/python -m pytest -m postgresql

image: $(READY) ## Carry out docker/Dockerfile for CPUs without Docker, and try the image (root; debootstrap)
	@$(BIN)/python -m pytest -s -m image tests/test_image.py

smoke: $(READY) ## Run every benchmark at its smallest size, three at a time (about 5 minutes)
	@$(BIN)/python -m pytest --progress=$@ -n $(BENCHMARKS) --dist load --maxschedchunk 1 -m $(SMOKE) tests/benchmarks

kernels: $(READY) ## Interpret and compile the encoder's CUDA kernels with three versions of Triton, without a GPU
	@$(TOGETHER) $(KERNELS)

kernels-tests: $(TRITON)/3.7.1/triton
	@PYTHONPATH=$(TRITON)/3.7.1 $(BIN)/python -m pytest --progress=$@ $(PARALLEL) $(CASES) tests/cuda_ext/test_encoder_triton.py

kernels-v100: build/cuda12/nvidia
	@PYTHONPATH=build/cuda12 $(BIN)/python -m pytest tests/cuda_ext/test_adan_build.py -k v100

kernels-3.6.0 kernels-newest: kernels-%: $(TRITON)/%/triton
	@PYTHONPATH=$(TRITON)/$* $(BIN)/python -m tests.cuda_ext.encoder_check sm_75 sm_90

$(TRITON)/%/triton: | $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(TRITON)/$* \
	  triton$(if $(filter newest,$*),,==$*)

build/cuda12/nvidia: | $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target build/cuda12 nvidia-cuda-nvrtc-cu12==12.6.85 nvidia-cuda-runtime-cu12==12.6.77

lint: $(READY) $(NODE_READY) ## Check style, types and import contracts, of the web page's JavaScript too
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(if $(NODE_READY),npm run --silent lint && npm test --silent,$(NO_NODE))

format: $(READY) $(NODE_READY) ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(if $(NODE_READY),npm run --silent format)

node_modules/.package-lock.json: package.json package-lock.json
	@npm ci --silent --no-audit --no-fund

docs: $(READY) ## Regenerate docs/errors.md and the tables in docs/security.md and docs/hardware.md
	@$(BIN)/python -m tests.generated_docs

bench: $(READY) ## Run every benchmark in full; each prints one JSON object as its last line
	@for module in $$(grep -l '__name__ == "__main__"' benchmarks/*.py); do \
	  name=$$(basename $$module .py); echo "== benchmarks.$$name"; \
	  $(BIN)/python -m benchmarks.$$name || exit 1; \
	done

mutation: $(READY) ## Change ROOM (service/domain) in small ways, and show what its tests do not notice
	@$(BIN)/python -m tests.mutation $(or $(ROOM),service/domain)

gpu-wheels: $(READY) ## Fetch the small wheels that a GPU machine lacks (PYTHON_OF_GPU=3.12) into build/wheels
	@rm -rf build/wheels
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version $(PYTHON_OF_GPU) --implementation cp \
	  $(foreach glibc,2_17 2_24 2_27 2_28 2_34,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
	  --platform manylinux1_x86_64 -c constraints.txt -d build/wheels $(GPU_WHEELS)
	@ls build/wheels

clean: ## Remove caches and build outputs, but not the virtual environment
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build node_modules *.egg-info
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
