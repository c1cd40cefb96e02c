# Two commands on a fresh machine: `make demo` and `make test`. `make` alone lists the rest.
.DEFAULT_GOAL := help
SHELL := /bin/sh
MAKEFLAGS += --no-print-directory

ENGINE ?= cpu
WORKERS ?= 2
export PRORL_ENGINE := $(ENGINE)
export PRORL_ALL_CASES := $(ALL)
VENV := .venv/bin
# Set-up runs before anything is installed: it finds the packages by their folders.
SOURCES := PYTHONPATH=$(CURDIR):$(CURDIR)/ipc:$(CURDIR)/launch
AGENTS := claude-code codex gemini-cli mini-swe-agent opencode pi
PACKAGES := prorl_trio sandbox_daemon ipc launch perf examples

# The first Python that is new enough makes every environment; `make PYTHON=/path/to/python3.12 setup` overrules.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; }; done)

.NOTPARALLEL:
.PHONY: help setup setup-dev engine trainers lock agents check-beside-downloads apptainer apptainer-if-possible slurm-if-possible chromium-if-possible demo learn doctor check quick hosted test e2e soak mutants docs site format clean clean-cache

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Settings: PYTHON=..., ENGINE=cpu|gpu, WORKERS=2 (of tests), APPTAINER=no SLURM=no CHROMIUM=no (install nothing for tests),"
	@echo "  ALL=1 (e2e: every case, not a part of some; check: async rules for tests too), PRORL_CACHE_DIR=... (default ~/.cache/prorl-trio)"

setup: python ## everything: .venv, the engine's environment and the model (once; then a quick no-op)
	@$(SOURCES) $(PYTHON) -m prorl_launch.setup dev engine --engine $(ENGINE)

setup-dev: python ## only .venv: enough for `make check` and the quick tests
	@$(SOURCES) $(PYTHON) -m prorl_launch.setup dev

engine: python ## only the inference engine and the model, in the cache folder (about 4 GB)
	@$(SOURCES) $(PYTHON) -m prorl_launch.setup engine --engine $(ENGINE)

trainers: python ## the trainers' own environments, for tests and `make learn`, in the cache folder (about 2.5 GB)
	@$(SOURCES) $(PYTHON) -m prorl_launch.setup train --engine $(ENGINE) & train=$$!; \
	$(SOURCES) $(PYTHON) -m prorl_launch.setup verl --engine $(ENGINE); code=$$?; wait $$train && exit $$code

lock: python ## resolve what set-up installs again: writes launch/prorl_launch/locks/*.txt
	@$(SOURCES) $(PYTHON) -m prorl_launch.relock

.PHONY: python
python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "prorl-trio needs Python 3.11 or newer; found: $$(python3 --version 2>&1 | head -n 1)" >&2; \
		echo "On Debian 12, Ubuntu 24.04 and later: sudo apt-get install python3 python3-venv" >&2; \
		echo "On Ubuntu 22.04: sudo apt-get install python3.11 python3.11-venv" >&2; exit 1; fi

agents: setup-dev ## install the agents of others that tests let work, in the cache folder (1.4 GB)
	@$(VENV)/prorl-trio agents install --if-possible $(AGENTS)

# Downloads beside what takes the processors. Engine first: its wheels are the trainers' as well.
check-beside-downloads: setup-dev
	@{ $(MAKE) engine && $(MAKE) trainers; } & engine=$$!; $(MAKE) agents & agents=$$!; $(MAKE) check; code=$$?; \
	wait $$engine || code=1; wait $$agents || code=1; exit $$code

apptainer: ## install Apptainer on Debian/Ubuntu (root or sudo; names the system packages first)
	@launch/prorl_launch/apptainer.sh

apptainer-if-possible:
	@[ "$(APPTAINER)" = no ] || launch/prorl_launch/apptainer.sh --if-possible

slurm-if-possible:
	@[ "$(SLURM)" = no ] || launch/prorl_launch/slurm/cluster.sh install --if-possible

chromium-if-possible:
	@[ "$(CHROMIUM)" = no ] || launch/prorl_launch/chromium.sh --if-possible

learn: setup trainers ## a real policy learns to use a tool: an hour on two cores (QUICK=1: three minutes; AGENT=pydantic-ai: through a program)
	@$(VENV)/prorl-trio learn $(if $(QUICK),--quick) $(if $(AGENT),--agent $(AGENT)) $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(RESUME),--resume $(RESUME)) $(if $(NO_DYNAMIC),--no-dynamic)

demo: setup ## the main job: a real model solves real problems in real sandboxes
	@$(VENV)/prorl-trio demo

doctor: setup-dev ## what is installed, what is missing, what to do
	@$(VENV)/prorl-trio doctor

check: setup-dev ## format, lint, types, async rules, import direction
	$(VENV)/ruff format --check $(PACKAGES) tests
	$(VENV)/ruff check $(PACKAGES) tests
	@# mypy is one process, beside which flake8 has the other cores. The rules of that are about async code, and it takes
	@# most of a second for each file: files without any are left out, and without ALL=1 tests, which have ruff's rules
	$(VENV)/mypy & types=$$!; \
	grep -rlE --include='*.py' '^ *async (def|with|for) |\bawait ' $(PACKAGES) $(if $(ALL),tests,tests/support) | xargs $(VENV)/python -m flake8; code=$$?; \
	wait $$types && exit $$code
	$(VENV)/lint-imports
	$(VENV)/python tests/support/prose.py
	$(VENV)/shellcheck launch/*/*.sh launch/*/*/*.sh .ci/run

docs: setup-dev ## write the tables of docs/node-toml.md and ipc/PROTOCOL.md from the code
	$(VENV)/python tests/support/documents.py

site: setup-dev ## the documentation as a site, with the API from docstrings: build/site/docs/site/index.html
	@$(VENV)/python -m sphinx -q -W --keep-going -c docs/site . build/site

format: setup-dev ## let ruff format and repair what it can
	$(VENV)/ruff format $(PACKAGES) tests
	$(VENV)/ruff check --fix $(PACKAGES) tests

# A file at a time in each of WORKERS processes; then, one by one, what is marked `alone`. Both parts run, whatever fails.
# Paths of sockets are short: below the folder that pytest would choose, that of a worker would make them too long.
define pytest
	folder=$$(mktemp -d); code=0; \
	$(VENV)/python -m pytest -m "$(1) and not alone" --durations=15 --basetemp="$$folder" \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder || code=$$?; \
	[ $$code -ne 0 ] || rm -rf "$$folder"; \
	$(VENV)/python -m pytest -m "$(1) and alone" --durations=15 || code=$$?; \
	exit $$code
endef

quick: setup-dev ## unit and component tests of what changed against main, the nearest first: a minute (BASE=ref)
	@$(VENV)/python tests/support/quick.py $(if $(BASE),--base $(BASE))

hosted: setup-dev ## the unit and component tests, as hosted CI runs them: no engine, no trainers, no namespaces needed
	$(VENV)/python -m pytest tests/unit tests/component -m "not slow and not soak and not alone" \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: apptainer-if-possible check-beside-downloads setup ## check, then the whole suite but for the slow marks
	$(call pytest,not slow and not soak)

e2e: setup trainers agents apptainer-if-possible slurm-if-possible chromium-if-possible ## the slow suite: the real engine, the real sandboxes, end to end
	$(call pytest,slow and not soak)

soak: setup apptainer-if-possible slurm-if-possible ## a thousand sandboxes in a row, thousands of jobs under kill -9 (hours)
	$(VENV)/python -m pytest -m soak

mutants: setup-dev ## put small faults into the code, each of which a test must find (ONLY="ledger fleet": some kinds)
	@$(VENV)/python tests/mutants/run.py -j $(WORKERS) $(foreach each,$(ONLY),--only $(each))

clean: ## remove what was made in the checkout
	rm -rf .venv build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-cache: python ## remove what was made in the cache folder: engine and trainer environments, the model, tokenizers, peers, images, logs
	cd "$$($(SOURCES) $(PYTHON) -c 'from prorl_launch.paths import cache_dir; print(cache_dir())')" && \
		rm -rf agents import-paths uv uv-* engine-* train-* verl-* models tokenizers peers apptainer host-pythons runtimes images test-images test-tools lock-tools logs
