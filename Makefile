# Everything runs from a virtual environment in .venv that the lock file defines.

PYTHON     ?= python3
UV_VERSION := 0.13.8

VENV     := .venv
PY       := $(VENV)/bin/python
UV       := $(VENV)/bin/uv
UV_STAMP := $(VENV)/.uv-$(UV_VERSION)
STAMP    := $(VENV)/.installed
PACKAGES := env agents training deploy benchmarks
SCRIPTS  := $(wildcard train.py deploy.py)
# What shows cgroup v2 at work in some five minutes of emulation.
V2_TESTS := tests/live/test_weights.py tests/live/jobs/test_precedence.py tests/live/test_live_deploy.py \
	tests/live/node/test_node.py -k "test_weights or test_precedence or run_to_their_end or check_says or held_started"
# What runs and times real programs has the machine for itself; all else is shared out to processes.
TIMED    := tests/benchmarks $(addprefix tests/deploy/,engines group linux load) tests/live $(addprefix tests/training/,machine measuring study)
# A machine that is shared takes vCPUs away for longer than some of these tests can bear: whoever fails
# has two more tries, some time later, which are shown.
RERUNS   := --reruns 2 --reruns-delay 10 -r fER
NODE_IMAGE ?= coretide-node:0.1.0
SUDO     := $(if $(filter-out 0,$(shell id -u)),sudo)

# Trust what the system trusts: some networks put a certificate of their own in between.
export UV_SYSTEM_CERTS := true

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-live test-live-v2 cluster-test node-image memcached-proxy lint bench lock clean

help:  ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

setup: $(STAMP)  ## install what the lock file names into .venv

demo: setup  ## measure this machine, deploy on it, compare with a published rule
	$(SUDO) $(PY) -m deploy.demo

test: lint  ## lint, check the types and run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile $(TIMED:%=--ignore %)
	$(PY) -m pytest $(RERUNS) $(TIMED)

test-live: setup  ## heavy checks: kill and break what the live side stands on, measure; root and Docker
	$(SUDO) $(PY) -m pytest -p no:cacheprovider $(RERUNS) -m survival $(TIMED)

test-live-v2: setup  ## the live tests on cgroup v2, in an emulated guest; needs root and Debian
	$(SUDO) tests/live/guest/boot $(PY) -m pytest --color=no -p no:cacheprovider $(V2_TESTS)

cluster-test: setup  ## plans on a real Kubernetes control plane, built once; needs Go
	$(PY) -m tests.cluster.control_plane_build
	$(PY) -m pytest -m cluster tests/cluster

node-image:  ## the image that a cluster's nodes run, of what is committed; needs Docker
	git archive HEAD | docker build $(BUILD_FLAGS) --tag $(NODE_IMAGE) --file deploy/node/Dockerfile -

memcached-proxy: setup  ## a memcached with its proxy, built once from Debian's source package
	$(PY) -m deploy.engines.proxy_build

lint: setup  ## ruff and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy $(PACKAGES:%=-p %)
	$(if $(SCRIPTS),$(PY) -m mypy $(SCRIPTS))

bench: setup  ## measure speed, write bench.json
	$(PY) -m benchmarks.speed --json bench.json

# `make lock LOCK_FLAGS=--upgrade` takes the newest versions.
COMPILE = $(UV) pip compile pyproject.toml --universal --python-version 3.10 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --quiet

lock: $(UV_STAMP)  ## write the lock files anew from pyproject.toml
	$(COMPILE) $(LOCK_FLAGS) --all-extras --output-file requirements.lock
	$(COMPILE) $(LOCK_FLAGS) --constraint requirements.lock --output-file requirements-agent.lock
	$(COMPILE) $(LOCK_FLAGS) --constraint requirements.lock --extra cluster --output-file requirements-node.lock

clean:  ## remove .venv, caches and outputs
	rm -rf $(VENV) build dist runs demo report bench.json *.egg-info .numba*
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(PACKAGES) tests -name __pycache__ -type d -exec rm -rf {} +

# uv names itself by version in the stamp, so that a new UV_VERSION is installed.
$(UV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		$(SUDO) apt-get update -qq && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	touch $@

# Everything is compiled to bytecode here, once: who runs it later may not be able to keep it (a
# service without write access, PYTHONDONTWRITEBYTECODE) and would compile it at every start. The
# simulator's kernels are, too: half a minute that a first measurement need not wait for.
$(STAMP): requirements.lock pyproject.toml $(UV_STAMP)
	$(UV) pip sync --quiet --python $(PY) --require-hashes --compile-bytecode requirements.lock
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	$(PY) -m compileall -q $(PACKAGES) $(SCRIPTS)
	$(PY) -m training.refinement.kernels
	touch $@
