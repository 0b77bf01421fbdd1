# `make demo` and `make test` work from nothing but Python 3.10 to 3.13: the first run makes .venv, later runs are quick.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/made-from-this-pyproject
PEERS_VENV ?= .venv-peers
CONVERTERS ?= .venv-converters

.PHONY: help demo test test-slow test-peers test-gpu test-browser test-fuzz lint types smoke budget bench clean
help:
	@echo "make demo        convert SmolLM2-135M to AWQ and GPTQ INT4, generate from each, compare"
	@echo "make test        the tests (about 10 minutes on 2 cores)"
	@echo "make test-slow   the long ones: whole-model conversions, sweeps"
	@echo "make test-peers  our checkpoints in GPTQModel and transformers, in $(PEERS_VENV); peers' quantizers in $(CONVERTERS)"
	@echo "make test-gpu    the tests that need a CUDA device"
	@echo "make test-browser  the page in headless Chromium"
	@echo "make test-fuzz   whatever the server's OpenAPI allows, by schemathesis"
	@echo "make lint        ruff and mypy"
	@echo "make smoke       build the wheel, import it in a fresh environment"
	@echo "make budget      compile the kernels for Turing, check registers, stack, shared memory, instructions"
	@echo "make bench       CPU decode speed beside transformers"

$(STAMP): pyproject.toml .ci/make_venv.py
	$(PYTHON) .ci/make_venv.py $(VENV) dev
	@cp pyproject.toml $@

demo: $(STAMP)
	$(BIN)/qengine demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not peers and not gpu" $(TEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not peers and not gpu" $(TEST_ARGS)

test-peers: $(STAMP)
	tests/peers/make_env.sh $(PEERS_VENV)
	tests/peers/make_converters.sh $(CONVERTERS)
	QENGINE_PEERS_VENV=$(PEERS_VENV) QENGINE_CONVERTERS=$(CONVERTERS) $(BIN)/python -m pytest -m peers $(TEST_ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu $(TEST_ARGS)

test-fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	$(BIN)/python -m pytest -m slow tests/server/test_schemathesis.py $(TEST_ARGS)

test-browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[browser]"
	QENGINE_REQUIRE_BROWSER=1 $(BIN)/python -m pytest tests/browser $(TEST_ARGS)

lint types: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

smoke: $(STAMP)
	.ci/smoke_wheel.sh $(VENV)

budget: $(STAMP)
	$(BIN)/python benchmarks/t4_model.py --check
	$(BIN)/python benchmarks/fused_ops.py --check

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_decode.py $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-smoke .venv-peers .venv-converters build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
