# Two commands for newcomers: `make demo` and `make test`. Both make .venv and install the pinned
# packages first; where that was done before, nothing is downloaded again.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
LOCK := requirements/lock.txt
# The part of it that a run and its report import: all that `make demo` waits for.
RUN_LOCK := requirements/run.txt
# torch's entry in it. To unpack torch takes as long as all the others, so both are done at once.
TORCH_ENTRY := /^torch==/,/[^\\]$$/
TORCH_CPU := requirements/torch-cpu.txt
TORCH_CUDA := requirements/torch-cuda.txt
# Transformer Engine's Python, for the tests: in folders beside site-packages, where Megatron would
# find it and miss its compiled extension.
TE_LOCKS := $(sort $(wildcard requirements/te/*.txt))
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# A stamp's name follows what was installed, so a changed lock or pyproject.toml installs anew.
hash_of = $(shell cat $(1) pyproject.toml setup.py 2>/dev/null | sha256sum | cut -c1-16)
RUN_STAMP := $(VENV)/.installed-run-$(call hash_of,$(RUN_LOCK))
STAMP := $(VENV)/.installed-all-$(call hash_of,$(RUN_LOCK) $(LOCK) $(TE_LOCKS))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Every file is checked against its hash; wheels alone, so that none of them runs code by being
# installed; and the lock is complete, so nothing is added to it.
# Python compiles what it imports; pip would compile the rest, too.
INSTALL_LOCKED := $(PIP) install -q --require-hashes --only-binary :all: --no-deps --no-compile -r
# A laptop is spared CUDA (3 GB) if there is a wheel of torch without it: in pip's own sources or in
# PyTorch's index. Else PyPI's torch is taken, which on Linux wants CUDA's libraries beside it.
WANTS_CUDA := $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(not \
  (sys.platform == "linux" and any("nvidia" in r for r in m.requires("torch") or ())))'
RUN_DIR ?= runs/demo
DEMO_ARGS ?=
TIER ?= -m "not slow"
PYTEST_ARGS ?=
BENCH_ARGS ?=
BENCH_PYTHON ?=

# megatron.training is in megatron-core's wheel from 0.17 on, which wants Python 3.12; its tests have
# a venv of their own, with older releases unpacked beside it.
MEGATRON_PYTHON ?= $(shell sh tests/megatron/find_python.sh)
MEGATRON_VENV ?= .venv-megatron
MEGATRON_LOCK := requirements/megatron.txt
MEGATRON_RELEASES := 0.16.1 0.17.1 0.18.2
MEGATRON_STAMP := $(MEGATRON_VENV)/.installed-$(shell cat $(MEGATRON_LOCK) $(TE_LOCKS) | sha256sum | cut -c1-16)
MEGATRON_PIP := $(MEGATRON_VENV)/bin/python -m pip --disable-pip-version-check

# Megatron-Bridge's recipes import most of its models, so their packages are installed as well; none
# that only a GPU runs. The packages of megatron.txt come first, then these without dependencies.
BRIDGE_VENV ?= .venv-bridge
BRIDGE_LOCK := requirements/bridge.txt
BRIDGE_RELEASES := 0.3.1 0.4.2 0.5.1
BRIDGE_STAMP := $(BRIDGE_VENV)/.installed-$(shell cat $(MEGATRON_LOCK) $(BRIDGE_LOCK) $(TE_LOCKS) | sha256sum | cut -c1-16)
BRIDGE_PIP := $(BRIDGE_VENV)/bin/python -m pip --disable-pip-version-check
# Its wheel for x86 Linux claims a newer glibc than Debian 12 has; what Bridge imports of it is Python.
BRIDGE_NVRX := nvidia-resiliency-ext==0.6.0
BRIDGE_NVRX_PLATFORM ?= manylinux_2_39_x86_64

# One thread a process: ranks share the cores, and results do not depend on the machine's count.
export OMP_NUM_THREADS ?= 1
# No test compiles, and without Dynamo every process that imports Megatron starts seconds sooner.
unit distributed: export TORCHDYNAMO_DISABLE = 1
# Prints where the time of `make test` goes.
timed = @trap 'echo "$@: $$SECONDS s"' EXIT;
# What a file's tests share is made once. Files with few tests take the longest: they do not wait.
BY_FILE := --dist loadfile --no-loadscope-reorder

.PHONY: help
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: install
install: $(STAMP)  ## make .venv and install the pinned packages

$(RUN_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "megatron-core has wheels for Python 3.11 to 3.13; got $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	@echo "installing what a run needs into $(VENV): 1.1 GB, some minutes"
	@$(PYTHON) -m venv $(VENV); echo "  $$SECONDS s: made $(VENV)"; \
	{ $(INSTALL_LOCKED) $(TORCH_CPU) --extra-index-url $(TORCH_INDEX) --retries 1 || \
	  { echo "could not install torch for the CPU alone; taking PyPI's"; \
	    $(INSTALL_LOCKED) <(sed -n '$(TORCH_ENTRY)p' $(RUN_LOCK)); }; \
	  if $(WANTS_CUDA); then $(INSTALL_LOCKED) $(TORCH_CUDA); fi; echo "  $$SECONDS s: torch is there"; } & \
	torch=$$!; \
	$(INSTALL_LOCKED) <(sed '$(TORCH_ENTRY)d' $(RUN_LOCK)); echo "  $$SECONDS s: the other packages are there"; \
	$(PIP) install -q --no-deps --no-build-isolation -e .; wait $$torch; \
	echo "  $$SECONDS s: installed"
	@rm -f $(VENV)/.installed-*
	@touch $@

$(STAMP): $(RUN_STAMP)
	$(INSTALL_LOCKED) $(LOCK)
	@if $(WANTS_CUDA); then $(INSTALL_LOCKED) $(TORCH_CUDA); fi
	@$(foreach file,$(TE_LOCKS),$(INSTALL_LOCKED) $(file) --upgrade --target $(VENV)/te/$(basename $(notdir $(file)));)
	@rm -f $(VENV)/.installed-all-*
	@touch $@

# The demo is one of two CPU ranks, also where torch has CUDA (Python 3.12) and there are GPUs.
# pip left the packages without bytecode. In an environment that forbids Python to write it, as many
# containers do, each process would compile torch and Megatron again.
.PHONY: demo
demo: export PYTHONDONTWRITEBYTECODE =
demo: export CUDA_VISIBLE_DEVICES =
demo: $(RUN_STAMP)  ## train a small Llama with SNIP on two ranks and show what it did
	@$(BIN)/megatron-snip train --config configs/demo.yaml --run-dir "$(RUN_DIR)" --overwrite $(DEMO_ARGS); \
	trained=$$SECONDS; \
	echo "the report, for a browser: $$($(BIN)/megatron-snip report "$(RUN_DIR)")"; \
	echo "seconds: $$trained for the run with its start, $$((SECONDS - trained)) for the report"
	@echo "to use megatron-snip in this shell: source $(BIN)/activate"

.PHONY: test
test: lint types docs unit distributed  ## lint, types, docs and the fast tests

.PHONY: test-all
test-all: TIER :=
test-all: lint types docs unit distributed  ## the same with the slow tests

.PHONY: lint
lint: $(STAMP)  ## ruff, codespell, shellcheck
	$(timed) $(BIN)/ruff check .; $(BIN)/ruff format --check .; $(BIN)/codespell; \
	  $(BIN)/shellcheck -x launch/*.sh launch/*.sbatch tests/megatron/*.sh tests/slurm/*.sh

.PHONY: types
types: $(STAMP)  ## mypy --strict
	rm -rf build/types && mkdir -p build/types/megatron_snip
	ln -s "$(CURDIR)"/megatron_snip/* "$(CURDIR)/kernels" "$(CURDIR)/patches" build/types/megatron_snip/
	$(timed) $(BIN)/mypy

# Material for MkDocs advertises a successor of MkDocs.
.PHONY: docs
docs: $(STAMP)  ## build the documentation into site/; a warning is an error
	$(timed) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: docs-flags
docs-flags: $(STAMP)  ## write docs/flags.md from the command line's parsers
	$(BIN)/python docs/flags_page.py --write

.PHONY: unit
unit: $(STAMP)  ## tests of one process
	$(timed) $(BIN)/pytest tests/unit tests/hostile -n 2 $(BY_FILE) $(TIER) $(PYTEST_ARGS)

.PHONY: distributed
distributed: $(STAMP)  ## tests of 2 and 4 gloo ranks
	$(timed) $(BIN)/pytest tests/distributed -n 2 $(BY_FILE) $(TIER) $(PYTEST_ARGS)

# The stamp of an environment, unless it is not there and no Python can make it. It is expanded for the
# target that is made: no recipe calls make, which `make -n` would run.
.SECONDEXPANSION:
stamp_if_possible = $(or $(wildcard $(1)),$(if $(MEGATRON_PYTHON),$(1)))

.PHONY: test-megatron
test-megatron: $$(call stamp_if_possible,$(MEGATRON_STAMP))  ## train with Megatron's own pretrain (Python 3.12; MEGATRON_MAIN=a clone of it)
	@if [ -e $(MEGATRON_STAMP) ]; then \
	  [ -n "$(MEGATRON_MAIN)" ] || \
	    echo "test-megatron: without MEGATRON_MAIN=CLONE, scripts of Megatron-LM are not run"; \
	  MEGATRON_RELEASES=$(abspath $(MEGATRON_VENV))/releases MEGATRON_MAIN="$(MEGATRON_MAIN)" \
	    $(MEGATRON_VENV)/bin/python -m pytest tests/megatron $(PYTEST_ARGS); \
	else \
	  echo "test-megatron: SKIPPED: found no Python 3.12 or later, on PATH or in pyenv"; \
	fi

$(MEGATRON_STAMP):
	$(MEGATRON_PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_PIP) install -q -r $(MEGATRON_LOCK)
	@for release in $(MEGATRON_RELEASES); do \
	  $(MEGATRON_PIP) install -q --upgrade --no-deps \
	    --target $(MEGATRON_VENV)/releases/$$release megatron-core==$$release; \
	done
	@$(foreach file,$(TE_LOCKS),$(MEGATRON_PIP) install -q --require-hashes --no-deps -r $(file) \
	  --upgrade --target $(MEGATRON_VENV)/te/$(basename $(notdir $(file)));)
	@rm -f $(MEGATRON_VENV)/.installed-*
	@touch $@

.PHONY: test-bridge
test-bridge: $$(call stamp_if_possible,$(BRIDGE_STAMP))  ## train recipes with Megatron-Bridge's own pretrain (Python 3.12)
	@if [ -e $(BRIDGE_STAMP) ]; then \
	  BRIDGE_RELEASES=$(abspath $(BRIDGE_VENV))/releases \
	    $(BRIDGE_VENV)/bin/python -m pytest tests/bridge $(PYTEST_ARGS); \
	else \
	  echo "test-bridge: SKIPPED: found no Python 3.12, on PATH or in pyenv"; \
	fi

$(BRIDGE_STAMP):
	$(MEGATRON_PYTHON) -m venv $(BRIDGE_VENV)
	$(BRIDGE_PIP) install -q -r $(MEGATRON_LOCK)
	$(BRIDGE_PIP) install -q --no-deps -r $(BRIDGE_LOCK)
	$(BRIDGE_PIP) install -q --no-deps --only-binary :all: --platform $(BRIDGE_NVRX_PLATFORM) \
	  --upgrade --target "$$($(BRIDGE_VENV)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')" \
	  $(BRIDGE_NVRX)
	@for release in $(BRIDGE_RELEASES); do \
	  $(BRIDGE_PIP) install -q --upgrade --no-deps \
	    --target $(BRIDGE_VENV)/releases/$$release megatron-bridge==$$release; \
	done
	@$(foreach file,$(TE_LOCKS),$(BRIDGE_PIP) install -q --require-hashes --no-deps -r $(file) \
	  --upgrade --target $(BRIDGE_VENV)/te/$(basename $(notdir $(file)));)
	@rm -f $(BRIDGE_VENV)/.installed-*
	@touch $@

# Debian and Ubuntu; elsewhere install Chromium or Chrome yourself, and the tests find it on PATH.
.PHONY: test-browser
test-browser: $(STAMP)  ## look at a report in headless Chromium
	@command -v chromium chromium-browser google-chrome google-chrome-stable chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends chromium; } || \
	  echo "test-browser: found no Chromium on PATH; as root: apt-get install chromium"
	$(BIN)/pytest tests/browser $(PYTEST_ARGS)

.PHONY: dist
dist: $(STAMP)  ## sdist and wheel (made from the sdist) in dist/
	rm -rf build dist
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	$(PIP) wheel -q --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

.PHONY: test-slurm
test-slurm: $(STAMP)  ## train on a real two-node Slurm on this machine (root; installs Slurm)
	@sh tests/slurm/install.sh
	$(BIN)/pytest tests/slurm $(PYTEST_ARGS)

# What a GPU machine without a network needs, in one file: `sh dist/megatron-snip-gpu.sh` there.
.PHONY: gpu-bundle
gpu-bundle:  ## the last commit and its wheels in dist/megatron-snip-gpu.sh, for bench-gpu
	@$(PYTHON) benchmarks/start.py --bundle dist/megatron-snip-gpu.sh

# Not in .venv, whose torch has no CUDA: which Python instead, benchmarks/start.py decides.
.PHONY: bench-gpu
bench-gpu:  ## the next 12 minutes of this machine's GPU benchmarks; again until none is left
	@BENCH_PYTHON="$(BENCH_PYTHON)" $(PYTHON) benchmarks/start.py $(BENCH_ARGS)

.PHONY: nightly
nightly: $(STAMP)  ## random planning problems, killed runs, faults, hostile files
	$(BIN)/pytest tests/nightly/planner.py tests/nightly/kills.py tests/nightly/faults.py \
	  tests/nightly/inputs.py
	$(BIN)/python -m tests.nightly.reliability --write

.PHONY: lock
lock: $(STAMP)  ## write requirements/ from what .venv holds, with hashes (wants uv)
	$(BIN)/python requirements/lock.py
	$(BIN)/python -m tests.hostile.licences

# Without --strict a package that the service does not know counts as free of vulnerabilities.
.PHONY: audit
audit:  ## look for known vulnerabilities in what is pinned (wants pip-audit and its service)
	for file in $(LOCK) $(TORCH_CUDA); do \
	  pip-audit --strict --disable-pip --require-hashes -r $$file; \
	done

.PHONY: clean
clean:  ## remove caches and build outputs (not .venv, not runs/)
	rm -rf build dist site ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
