# On a fresh machine `make demo` and `make test` each set up what they need: a virtual environment in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ENGINES_VENV  ?= .venv-engines
ENGINES_READY := $(ENGINES_VENV)/.ready
VLLM          ?= 0.32.0
SGLANG_VENV   ?= .venv-sglang
SGLANG_READY  := $(SGLANG_VENV)/.ready
SGLANG        ?= 0.5.23
RELEASE_VENV  ?= .venv-release
RELEASE_READY := $(RELEASE_VENV)/.ready
# Three processes, on two cores as well: much of a test is waiting for others; more starve the daemons on a slow machine.
# tests/conftest.py says what goes together.
BESIDE        ?= --numprocesses 3 --dist loadgroup --no-loadscope-reorder
# tests/faults: as many processes, and as often in a row.
WORKERS       ?= 2
TIMES         ?= 1
export ENGINES_VENV SGLANG_VENV
export NIXL_LOG_LEVEL ?= ERROR
unexport PYTHONDONTWRITEBYTECODE

# Makes the environment $(1). One without pip is half made (Debian without python3-venv leaves such), and is made anew.
venv = $(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $$(test ! -f $(1)/pyvenv.cfg || echo --clear) $(1)

.PHONY: help setup demo test test-slow test-long test-faults test-all engines-venv engines-sglang test-engines test-engines-all test-sglang
.PHONY: bench-vllm bench-vllm-gpu bench-sglang bench-sglang-gpu bench-tcp stepwise simulate mutants soak soak-vllm lint format proto reference models bench release clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install the development environment into .venv

$(READY): pyproject.toml
	@echo "setting up $(VENV): two to four minutes on a fresh machine"
	@$(call venv,$(VENV))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(READY) ## two engines of different shape, their daemons and a proxy; every token compared
	@$(BIN)/kvferry demo

test: $(READY) ## the tests, without the slow ones: about half an hour on two cores
	@echo "about half an hour on two cores; one file: $(BIN)/python -m pytest tests/unit/test_plan.py"
	@$(BIN)/python -m pytest $(BESIDE) -m "not slow and not long and not engines"

test-slow: $(READY) ## what the gate runs beside make test: more faults, a minute of the soak, larger engines
	@$(BIN)/python -m pytest $(BESIDE) -m "slow and not engines"

test-long: $(READY) ## the whole matrix of faults, 50 deaths under load, thousands of hostile messages: half an hour
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup -m "long and not engines" tests/faults tests/fuzz

test-faults: $(READY) ## tests/faults whole; WORKERS=8 by so many processes, TIMES=10 so often in a row
	@for _ in $$(seq $(TIMES)); do \
		$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup tests/faults || exit; done

test-all: $(READY) ## every test that this machine can run, but for the real engines
	@$(BIN)/python -m pytest $(BESIDE) -m "not engines"

engines-venv: $(ENGINES_READY) ## install a real vLLM for the CPU into .venv-engines

$(ENGINES_READY): tests/engines/install.py pyproject.toml
	@echo "setting up $(ENGINES_VENV): about five minutes and 3 GB on a fresh machine"
	@$(call venv,$(ENGINES_VENV))
	@$(ENGINES_VENV)/bin/python tests/engines/install.py $(VLLM)
	@touch $@

test-engines: $(READY) $(ENGINES_READY) ## real vLLM engines on both sides, other projects' routers, and SGLang where there is one: those of the gate
	@$(BIN)/python -m pytest -m "engines and not long" tests/engines

test-engines-all: $(READY) $(ENGINES_READY) ## all of them: more shapes, each prompt alone, daemons killed 50 times
	@$(BIN)/python -m pytest -m engines tests/engines

engines-sglang: $(SGLANG_READY) ## install a real SGLang for the CPU, and its router, into .venv-sglang

$(SGLANG_READY): tests/engines/install.py tests/engines/install_sglang.py tests/engines/sgl_kernel.py pyproject.toml
	@echo "setting up $(SGLANG_VENV): about five minutes and 3 GB on a fresh machine"
	@$(call venv,$(SGLANG_VENV))
	@$(SGLANG_VENV)/bin/python tests/engines/install_sglang.py $(SGLANG)
	@touch $@

test-sglang: $(READY) $(SGLANG_READY) ## real SGLang engines, behind SGLang's router, and beside vLLM where there is one
	@$(BIN)/python -m pytest -m engines tests/engines/test_sglang*.py

stepwise: $(READY) ## HOURS=8 of runs of daemons that are drawn from seeds, on all cores; a seed is printed for each kind of violation
	@$(BIN)/python tests/unit/seeded.py --hours $${HOURS:-1}

simulate: $(READY) ## the protocol without I/O: HOURS=8 draws runs on all cores, RUNS=8125 so many of each world, SEED=n plays one and prints its transcript
	@$(BIN)/python tests/simulation/simulate.py $(if $(WORLD),--world $(WORLD)) $(if $(SEED),--seed $(SEED)) $(if $(HOURS),--hours $(HOURS)) $(if $(RUNS),--runs $(RUNS))

mutants: $(READY) ## COUNT=300 small changes of the protocol, which the simulator has to find; half an hour of a core. SEED draws others, ONLY=leases those of one module
	@$(BIN)/python tests/simulation/mutants.py $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(ONLY),--only $(ONLY))

soak: $(READY) ## ten minutes (SOAK=seconds) of random requests and troubles among six daemons; ends with a table
	@SOAK=$${SOAK:-600} $(BIN)/python -m pytest tests/soak/test_soak.py

soak-vllm: $(READY) $(ENGINES_READY) ## the same with two vLLM engines: clients that leave, preemption, engines that die
	@SOAK=$${SOAK:-600} $(BIN)/python -m pytest -m "engines and long" tests/engines/test_vllm_soak.py

lint: $(READY) ## format check, lint, types and declared packages
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check --no-cache .  # cached answers go by a file, and the order of imports by its neighbours too
	@$(BIN)/mypy
	@$(BIN)/deptry --ignore DEP002 --no-ansi daemon clients

format: $(READY) ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: $(READY) ## generate clients/kvferry/v1 from proto/
	@$(BIN)/python tests/generate_stubs.py clients

reference: $(READY) ## generate docs/reference from the sources
	@$(BIN)/python tests/generate_reference.py docs/reference

models: $(READY) $(ENGINES_READY) ## compute the table of docs/models.md: a minute or two for each model; MODELS: of these only
	@$(ENGINES_VENV)/bin/python tests/engines/models.py --write $(MODELS)

bench: $(READY) ## the benchmarks of docs/benchmarks.md
	@$(BIN)/kvferry bench

bench-vllm: $(READY) $(ENGINES_READY) ## handover between real vLLM engines, beside vLLM's NixlConnector
	@$(BIN)/python tests/engines/bench_handover.py $(BENCH)

bench-vllm-gpu: $(READY) ## the same on two GPUs; ENGINES_VENV: an environment with vLLM for CUDA
	@$(BIN)/python tests/engines/bench_gpu.py $(BENCH)

bench-tcp: $(READY) $(ENGINES_READY) ## host memory over TCP alone, beside NIXL and Mooncake
	@$(BIN)/python tests/engines/bench_tcp.py

bench-sglang: $(READY) $(SGLANG_READY) ## handover between real SGLang engines, beside SGLang's own NIXL backend
	@$(BIN)/python tests/engines/bench_sglang.py $(BENCH)

bench-sglang-gpu: $(READY) ## the same on two GPUs; SGLANG_VENV: an environment with SGLang for CUDA
	@$(BIN)/python tests/engines/bench_sglang.py --gpus 0,1 $(BENCH)

release: $(RELEASE_READY) ## wheel, source archive, chart, images, SBOM and checksums of a tag, into dist/ (docs/releasing.md)
	@$(RELEASE_VENV)/bin/python deploy/release.py

$(RELEASE_READY): deploy/locks/build.txt deploy/locks/sbom.txt
	@echo "setting up $(RELEASE_VENV): half a minute"
	@$(call venv,$(RELEASE_VENV))
	@$(RELEASE_VENV)/bin/python -m pip install --quiet --require-hashes --requirement deploy/locks/build.txt --requirement deploy/locks/sbom.txt
	@touch $@

clean: ## remove the environment and caches
	rm -rf $(VENV) $(ENGINES_VENV) $(SGLANG_VENV) $(RELEASE_VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
