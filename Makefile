# `make run` on a bare machine with Python 3.11+: a virtual environment, then the server. `make help` lists the rest.
#
# Everything is installed into .venv, with the versions of constraints.txt, once: again only when pyproject.toml or constraints.txt
# has changed. Python compiles what it imports, so pip need not compile all of it: 35 s instead of 75. With another torch: `make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"`.

PYTHON ?= python3
PORT ?= 8000
TORCH ?=
ARGS ?=
# Of `make test`: two more than there are cores, because tests also wait; at most 4, since each may have servers of its
# own. 0 is one process, as plain pytest is.
WORKERS ?= $(shell expr $$(nproc) + 2)
SPREAD = -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# A test that hangs in C code, where its own timeout does not reach it, ends its worker, and fails with all stacks.
SPREAD += -o faulthandler_timeout=450 -o faulthandler_exit_on_timeout=true
# pip does not compile what it installs (below), so Python has to keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
RUN := $(VENV)/.noria-installed
DEV := $(VENV)/.noria-dev-installed
BROWSER := $(VENV)/.noria-browser-installed
DOCS := $(VENV)/.noria-docs-installed
FUZZ := $(VENV)/.noria-fuzz-installed
BIOME := @biomejs/biome@2.6.8
OUT ?= out/train

.DEFAULT_GOAL := help
.PHONY: help setup run test fast-tests test-bench test-slow test-random test-browser test-prometheus test-ray chaos fuzz soak lint bench gpu train dashboards docs dist clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV)  ## install everything into .venv, the tools of development too

$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "noria needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(VENV)/bin/python -m pip install $(TORCH))
	@echo "Installing into $(VENV): about a minute when pip has the packages, longer the first time."
	$(VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e ".[diffusion,minilm]"
	touch $@

$(DEV): $(RUN) benchmarks/pyproject.toml
	@# --group needs pip 25.1
	$(VENV)/bin/python -c 'import pip; exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))' || \
	  $(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e benchmarks --group dev
	touch $@

run: $(RUN)  ## set-up, then serve the bundled model; PORT=8000, ARGS="any flags of noria serve"
	$(VENV)/bin/noria serve --port $(PORT) $(ARGS)

lint: setup  ## ruff, mypy, import-linter, and Biome for the pages
	$(VENV)/bin/ruff check --no-cache  # its cache does not see new folders, which decide how imports are sorted
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@if npx --yes $(BIOME) --version > /dev/null 2>&1; then npx --yes $(BIOME) ci; else echo "npx cannot fetch Biome: the pages are not linted"; fi

test: setup  ## lint, and beside it the fast tests, spread over the cores file by file; WORKERS=0: in one process
	@$(MAKE) --no-print-directory -j 2 lint fast-tests

fast-tests:
	@# One process compiles what all workers import, while the linters have another core.
	@$(VENV)/bin/pytest --collect-only $(ARGS) > /dev/null 2>&1 || true
	$(VENV)/bin/pytest $(SPREAD) $(ARGS)

test-bench: setup  ## the fast tests of the benches, spread likewise
	cd benchmarks && ../$(VENV)/bin/pytest $(SPREAD) $(ARGS)

test-slow: setup  ## the slow tests; each says beside its mark why it is one
	$(VENV)/bin/pytest -m slow $(ARGS)
	cd benchmarks && ../$(VENV)/bin/pytest -m slow $(ARGS)

test-random: setup  ## the properties, with new random examples
	$(VENV)/bin/pytest --hypothesis-profile=searching tests/scheduling tests/canary tests/statistics tests/sampling tests/jobs/database/test_store.py tests/registry/deployments/test_operators.py tests/frontend $(ARGS)

test-browser: $(BROWSER)  ## the pages and the bench's reports in the system's Chromium
	$(VENV)/bin/pytest -m "browser and not slow" $(ARGS)
	cd benchmarks && ../$(VENV)/bin/pytest -m "browser and not slow" $(ARGS)

$(BROWSER): $(DEV)
	$(VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt --group browser
	touch $@

test-prometheus: setup  ## every panel and rule, evaluated by a real Prometheus (Debian: prometheus)
	$(VENV)/bin/pytest -m "prometheus and not ray" $(ARGS)

test-ray: setup  ## a Ray cluster on this machine, in an environment that pip makes (Debian: prometheus)
	$(VENV)/bin/pytest -m ray -n 0 $(ARGS)

dashboards: $(RUN)  ## write Grafana's dashboards from the code
	$(VENV)/bin/noria dashboards build

soak: MINUTES ?= 60
soak: setup  ## an hour of mixed traffic, attacks and kills: what grows; MINUTES=15
	$(VENV)/bin/noria bench soak --minutes $(MINUTES) $(ARGS)

chaos: setup  ## ten minutes of kill -9 under load, then a quiet client during attacks; CHAOS_REPORT=file.json for a report
	$(VENV)/bin/pytest -m chaos $(ARGS)

fuzz: MINUTES ?= 6
fuzz: $(FUZZ)  ## inputs that nobody sends, for 6 minutes: MINUTES=120 for two hours; ARGS="TARGET …"
	cd tests && ../$(VENV)/bin/python -m fuzz.run --minutes $(MINUTES) $(ARGS)

$(FUZZ): $(DEV)
	$(VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt --group fuzz
	touch $@

bench: setup  ## measure this machine for two minutes; ARGS="…"
	$(VENV)/bin/noria bench quick $(ARGS)

docs: $(DOCS)  ## write the pages that come from the code, then the site into build/docs; broken links fail
	$(VENV)/bin/python -c 'from noria.settings import settings_docs; print(settings_docs(), end="")' > docs/settings.md
	$(VENV)/bin/python -c 'from noria.observe.metrics.docs_page import metrics_page; print(metrics_page(), end="")' > docs/metrics.md
	$(VENV)/bin/python docs/module_list.py > docs/modules.md
	$(VENV)/bin/python docs/http_operation_list.py > docs/http-operations.md
	$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs build/docs

$(DOCS): $(DEV)
	$(VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt --group docs
	touch $@

dist: setup  ## sdists of both distributions, and wheels of the sdists, into dist/, which twine checks
	rm -rf dist
	$(VENV)/bin/python -m build --no-isolation --outdir dist .
	$(VENV)/bin/python -m build --no-isolation --outdir dist benchmarks
	$(VENV)/bin/python -m twine check --strict dist/*

gpu: setup  ## what needs a GPU, part by part, resumable: ARGS="--part A,B --after FOLDER"; without one, ARGS=--small
	-$(VENV)/bin/noria bench install triton
	-$(VENV)/bin/noria bench install infinity
	PYTHONPATH=src:benchmarks $(VENV)/bin/python -m noria_bench.gpu $(ARGS)

train: MINUTES ?= 60
train: setup  ## continue the training of the bundled model, resumable: MINUTES=60 OUT=out/train
	$(VENV)/bin/python examples/demo_model/train.py $(OUT) --minutes $(MINUTES) --start-from src/noria/models/bundled $(ARGS)
	$(VENV)/bin/python examples/demo_model/evaluate.py $(OUT)/pipeline --captions 300 --guidance 3 --out $(OUT)/evaluation.json

clean:  ## remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
