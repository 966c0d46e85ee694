# The commands of the project. Each sets up what it needs; make and Python >= 3.11 suffice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the demo and the wheels need comes first; the rest, torch among it, on top.
BASE_STAMP := $(VENV)/.base
STAMP := $(VENV)/.installed
# Has torch without CUDA: 200 MB where PyPI's wheel and what it needs are 3 GB.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Where `make wheels` puts them.
DIST := dist
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_33 := .venv-vllm-0.33
VLLM_33_STAMP := $(VLLM_33)/.installed
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.installed
ROUTERS := .venv-routers
ROUTERS_STAMP := $(ROUTERS)/.installed
# The bindings of CUDA 12, found before those of .venv.
CUDA12 := .cuda12
CUDA12_STAMP := $(CUDA12)/.installed

# Said before each step that waits for a package index; a slow one takes minutes for it.
say = @echo "make $(@D): $(1)" >&2

.DEFAULT_GOAL := help
.PHONY: help demo wheels demo-cluster test test-nightly mutants test-fast test-vllm test-vllm-0.33 test-vllm-0.33-fast test-sglang test-routers test-stalls test-explore test-cuda12 demo-vllm lint format bench bench-lane gpu check-deploy docs screenshot operations-transcript constraints constraints-vllm constraints-sglang clean restart-loop tier-kills fuzz soak events-exact demo-sglang sglang-kills nightly-vllm test-vllm-upstream nightly-sglang nightly

help: ## show this list
	@grep -hE '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BASE_STAMP): pyproject.toml client/tools/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvd needs Python >= 3.11, '$(PYTHON)' is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(call say,new environment of $(PYTHON))
	@$(PYTHON) -m venv $(VENV)
	$(call say,from the package index what builds kvd: 6 packages; 2 MB)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables
	$(call say,from the package index kvd and what its daemon needs: 22 packages; 120 MB on disk)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
	  --editable '.[daemon]' --editable client/tools
	@touch $@

$(STAMP): $(BASE_STAMP)
	$(call say,from the package index or $(TORCH_INDEX) torch without CUDA: 1 package; 750 MB on disk)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps \
	  --retries 1 --extra-index-url $(TORCH_INDEX) torch
	$(call say,from the package index what tests and checks need: 60 packages; 800 MB on disk)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
	  --editable '.[dev]'
	@touch $@

$(VLLM_STAMP): pyproject.toml client/tools/pyproject.toml tests/vllm/environment.sh tests/vllm/requirements.txt
	@PYTHON=$(PYTHON) tests/vllm/environment.sh $(VLLM)
	@touch $@

$(VLLM_33_STAMP): $(VLLM_STAMP) tests/vllm/environment-0.33.sh tests/vllm/requirements-0.33.txt
	@tests/vllm/environment-0.33.sh $(VLLM_33) $(VLLM)
	@touch $@

$(SGLANG_STAMP): pyproject.toml client/tools/pyproject.toml tests/sglang/environment.sh tests/sglang/requirements.txt
	@PYTHON=$(PYTHON) tests/sglang/environment.sh $(SGLANG)
	@touch $@

$(ROUTERS_STAMP): tests/routers/environment.sh tests/routers/requirements.txt
	@PYTHON=$(PYTHON) tests/routers/environment.sh $(ROUTERS)
	@touch $@

$(CUDA12_STAMP): $(STAMP)
	@rm -rf $(CUDA12)
	$(call say,from the package index the bindings of CUDA 12: 1 package; 30 MB on disk)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(CUDA12) 'cuda-bindings==12.9.*'
	@touch $@

.venv: $(STAMP)

.venv-vllm: $(VLLM_STAMP)

.venv-vllm-0.33: $(VLLM_33_STAMP)

.venv-sglang: $(SGLANG_STAMP)

.venv-routers: $(ROUTERS_STAMP)

demo: $(BASE_STAMP) ## two ranks store and load verified KV bytes through one daemon
	$(BIN)/kvd demo

# Hatchling of .venv, not one that pip would fetch for the build.
wheels: $(BASE_STAMP) ## build the wheels of daemon, client and tools into dist/
	rm -f $(DIST)/kvd_offload*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) . ./client/tools

demo-vllm: $(VLLM_STAMP) ## vLLM on a CPU, with a cache too small, then restarted
	$(VLLM)/bin/kvd demo-vllm

demo-sglang: $(SGLANG_STAMP) ## SGLang on a CPU, with a cache too small, then restarted
	$(SGLANG)/bin/kvd demo-sglang

demo-cluster: $(VLLM_STAMP) ## vLLM on two nodes that share a Mooncake Store; as root, for network namespaces
	PYTHONPATH=. $(VLLM)/bin/python -m tests.tier.demo_cluster

test: $(STAMP) ## every test that needs no GPU and no engine
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not nightly'

test-nightly: $(STAMP) ## what it leaves out: slow and rare
	$(BIN)/python -m pytest -n 2 --dist loadfile -m nightly -o timeout=900 -o faulthandler_timeout=800

mutants: $(STAMP) ## delete statements one by one (SAMPLE=n of each package), say which no test notices
	PYTHONPATH=. $(BIN)/python -m tests.mutants.run build/mutants --sample $(or $(SAMPLE),0) --seed $(or $(SEED),0)

# The packages that decide, and the parts around them: nothing here starts a daemon.
FAST := tests/proto tests/broker tests/cache tests/pool tests/wire tests/plan tests/replay tests/report tests/server

test-fast: $(STAMP) ## the part of it that starts no daemon: under a minute
	$(BIN)/python -m pytest -n 2 --dist loadfile $(FAST)

lint: $(STAMP) ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests
	MYPYPATH=bench $(BIN)/mypy bench/*.py docs/*.py deploy/grafana/*.py
	$(BIN)/lint-imports

format: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## measure the host backend; writes bench/out/host.json
	$(BIN)/python bench/host.py

bench-lane: $(STAMP) ## what a CUDA lane's processor time allows, without a GPU; writes bench/out/lane.json (QUICK=1 for less)
	PYTHONPATH=. $(BIN)/python bench/lane.py $(if $(QUICK),--quick)

docs: $(STAMP) ## write what is generated: protocol, settings, status, the table of models
	$(BIN)/python docs/generate_protocol.py
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_status.py
	$(BIN)/python docs/generate_models.py

screenshot: $(STAMP) ## take anew the pictures of the status page in README and docs
	KVD_SCREENSHOT=docs/status-page.png $(BIN)/python -m pytest tests/http/test_page.py -k picture_for_the_readme
	KVD_FORECAST_PICTURE=docs/memory-card.png $(BIN)/python -m pytest tests/http/test_memory.py -k cards_fit

operations-transcript: $(STAMP) ## run anew the session that docs/operations.md shows
	$(BIN)/python docs/generate_operations.py

constraints: $(STAMP) ## pin what is installed now
	@(head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//') > constraints.new
	@mv constraints.new constraints.txt

constraints-vllm: $(VLLM_STAMP) ## the same for the environment with vLLM
	@(head -n 2 tests/vllm/requirements.txt; $(VLLM)/bin/python -m pip freeze --exclude-editable | sed 's/+cpu//') > constraints.new
	@mv constraints.new tests/vllm/requirements.txt

constraints-sglang: $(SGLANG_STAMP) ## the same for the environment with SGLang
	@(head -n 2 tests/sglang/requirements.txt; $(SGLANG)/bin/python -m pip freeze --exclude-editable | sed 's/+cpu//') > constraints.new
	@mv constraints.new tests/sglang/requirements.txt

test-sglang: $(SGLANG_STAMP) $(VLLM_STAMP) ## tests with the real SGLang engine on CPU, and with vLLM beside it
	$(SGLANG)/bin/python -m pytest tests/sglang -m 'not nightly' -o faulthandler_timeout=500 -o timeout=600 -n 2 --dist loadfile

test-vllm: $(VLLM_STAMP) ## tests with the real vLLM engine on CPU
	$(VLLM)/bin/python -m pytest tests/vllm -m 'not nightly' -o faulthandler_timeout=500 -o timeout=600 -n 2 --dist loadfile

test-vllm-0.33: $(VLLM_33_STAMP) $(ROUTERS_STAMP) ## all tests with vLLM and routers on vLLM 0.33, with the CPU kernels of 0.32
	$(VLLM_33)/bin/python -m pytest tests/vllm tests/routers -o faulthandler_timeout=500 -o timeout=600 -n 2 --dist loadfile

# What a changed interface breaks first: the check at start, the halves of the connector stepped by
# vLLM's own code, ranks that stage or sleep, and an engine that stores, loads, preempts, resets and
# loses its daemon, with answers compared. The others are about models, plans, tiers, many engines.
VLLM_33_FAST := $(patsubst %,tests/vllm/test_%.py,upstream options scheduler rank spec staging sleep chunks events tier_waits shared_prefix step_loads failures)

test-vllm-0.33-fast: $(VLLM_33_STAMP) ## those of them that a changed interface breaks first
	$(VLLM_33)/bin/python -m pytest $(VLLM_33_FAST) -m 'not nightly' -o faulthandler_timeout=500 -o timeout=600 -n 2 --dist loadfile

test-routers: $(VLLM_STAMP) $(ROUTERS_STAMP) ## tests with Dynamo's real indexer, fed by real vLLM engines
	$(VLLM)/bin/python -m pytest tests/routers -m 'not nightly' -o faulthandler_timeout=500 -o timeout=600 -n 2 --dist loadfile

$(VENV)/naps.so: tests/stalls/naps.c $(STAMP)
	cc -shared -fPIC -O2 -o $@ $< -ldl

test-stalls: $(VENV)/naps.so ## make test on a machine where every thread stands still now and then; needs a C compiler
	LD_PRELOAD=$(CURDIR)/$< PYTHONPATH=tests/stalls $(BIN)/python -m pytest -n 4 --dist loadfile

test-explore: $(STAMP) ## property tests with thousands of random examples
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile=explore -o faulthandler_timeout=3600 -o timeout=4000

test-cuda12: $(CUDA12_STAMP) ## the tests on the test driver, with the bindings that engines on CUDA 12 have
	PYTHONPATH=$(CURDIR)/$(CUDA12) $(BIN)/python -c 'import cuda.bindings as b; assert b.__version__.startswith("12.9."), b.__version__'
	PYTHONPATH=$(CURDIR)/$(CUDA12) $(BIN)/python -m pytest -n 2 --dist loadfile -m fakecuda tests/client tests/lane tests/fakecuda tests/daemon/test_cuda.py

restart-loop: $(STAMP) ## kill -9 the daemon KILLS times under load (SEED=n to repeat), check every chunk
	PYTHONPATH=. $(BIN)/python -m tests.soak.restart_loop $(or $(KILLS),200) $(SEED)

tier-kills: $(STAMP) ## kill -9 daemon or disk tier in mid-write PASSES times (SEED=n to repeat), check every kept chunk
	PYTHONPATH=. $(BIN)/python -m tests.tier.kills $(or $(PASSES),200) $(SEED)

sglang-kills: $(SGLANG_STAMP) ## kill -9 the daemon KILLS times while SGLang serves (SEED=n, LAYERWISE=1, STAGING=1), check every answer
	PYTHONPATH=. $(SGLANG)/bin/python -m tests.sglang.kills $(or $(KILLS),100) $(SEED) $(if $(LAYERWISE),--layerwise) $(if $(STAGING),--staging)

nightly-sglang: $(SGLANG_STAMP) ## what test-sglang leaves out: slow models, long loops of kills
	$(SGLANG)/bin/python -m pytest tests/sglang -m nightly -o faulthandler_timeout=500 -o timeout=600
	$(MAKE) sglang-kills KILLS=100
	$(MAKE) sglang-kills KILLS=100 LAYERWISE=1
	$(MAKE) sglang-kills KILLS=100 STAGING=1

nightly-vllm: $(VLLM_STAMP) ## what test-vllm leaves out: unusual models, more failures
	$(VLLM)/bin/python -m pytest tests/vllm -m nightly -o faulthandler_timeout=500 -o timeout=600

test-vllm-upstream: $(VLLM_STAMP) $(VLLM_33_STAMP) ## vLLM's own tests of its offloading connector, with kvd's halves in their place
	PYTHONPATH=. $(VLLM)/bin/python -m tests.vllm.upstream_suite.run
	PYTHONPATH=. $(VLLM_33)/bin/python -m tests.vllm.upstream_suite.run

# What .ci/run leaves out and needs no GPU, each for as long as it takes by itself.
NIGHTLY := test-nightly demo demo-vllm demo-sglang demo-cluster bench bench-lane test-explore test-stalls test-cuda12 restart-loop tier-kills fuzz soak events-exact nightly-vllm test-vllm-0.33 test-vllm-upstream nightly-sglang check-deploy

nightly: ## the rare targets one after another, for hours; the last line names those that failed
	@failed=; for target in $(NIGHTLY); do \
	  echo "== make $$target"; $(MAKE) --no-print-directory $$target || failed="$$failed $$target"; done; \
	echo "== make events-exact TIER=1"; \
	$(MAKE) --no-print-directory events-exact TIER=1 || failed="$$failed events-exact-TIER=1"; \
	[ -z "$$failed" ] || { echo "make nightly: failed:$$failed"; exit 1; }

fuzz: $(STAMP) ## mutated sessions for SECONDS against codec, broker and a live daemon (SEED=n to repeat)
	PYTHONPATH=. $(BIN)/python tests/fuzz/run.py $(or $(SECONDS),600) $(SEED)

soak: $(STAMP) ## break everything at random for SECONDS while engines work (SEED=n to repeat)
	PYTHONPATH=. $(BIN)/python tests/chaos/run.py $(or $(SECONDS),1800) $(SEED)

events-exact: $(VLLM_STAMP) $(ROUTERS_STAMP) ## compare what routers know with what is cached, PASSES times (SEED=n to repeat, TIER=1 with a tier)
	PYTHONPATH=. $(VLLM)/bin/python -m tests.routers.exactness $(or $(PASSES),20) $(SEED) $(if $(TIER),--tier)

gpu: ## CUDA tests and benchmark on a real GPU; WHEELS=folder for missing packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make $@ needs Python >= 3.11 with torch, '$(PYTHON)' is older; try: make $@ PYTHON=python3.12"; exit 1; }
	@WHEELS="$(WHEELS)" $(PYTHON) tests/gpu/run.py

check-deploy: $(BASE_STAMP) ## build the image and run it, boot the unit; as root on Debian
	tests/install-debian.sh --images
	docker/check.sh
	deploy/systemd/check.sh

clean: ## remove what the commands above made
	rm -rf $(VENV) .venv-vllm .venv-vllm-0.33 .venv-lmcache .venv-sglang .venv-routers $(CUDA12) bench/out build/check build/mutants build/vllm-tests $(DIST) .mypy_cache .ruff_cache .pytest_cache .hypothesis
