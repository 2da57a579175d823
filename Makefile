# make demo     train a small EfficientNetV2 twice, full precision and the default backward quantization, and compare (two minutes); results in runs/demo
# make test     the test suite
# make test-exhaustive  the full crosses, of which it runs a part
# make test-trainers    the full crosses, with the trainers that brevact.trainers is for
# make test-all test and test-trainers
# make test-versions  the test suite in new environments, with the oldest, the pinned and the newest torch
# make coverage  the test suite, and the part of each package's statements that it runs
# make lint     ruff (rules and format) and mypy
# make docs     the documentation as a site in site/; a broken link or anchor fails it
# make picture  refresh docs/demo.png from a new demo run
# Each target first sets up .venv; only Python >= 3.10, git and make are needed. PYTHON=python3.12 picks an interpreter,
# VENV=folder another place for the environment.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
RUN := $(VENV)/bin/python
# Python compiles the modules that it imports; pip would compile all that it installs.
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
WORKERS ?= 2
# Tests start many processes, which would compile every module again where the environment forbids .pyc files.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo picture test test-exhaustive test-trainers test-all test-versions coverage lint docs

help:
	@sed -n 's/^# //p' Makefile

demo: $(READY)
	$(RUN) -m recipes.efficientnetv2 --compare DEFAULT --out-dir runs/demo --overwrite

picture: demo
	mkdir -p docs
	cp runs/demo/comparison.png docs/demo.png

test: $(READY)
	$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal

test-exhaustive: $(READY)
	$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal -m exhaustive

test-trainers: $(VENV)/.trainers-ready
	$(MAKE) test-exhaustive

test-all: $(VENV)/.trainers-ready
	$(MAKE) test
	$(MAKE) test-exhaustive

test-versions: $(VENV)/.dev-ready
	$(RUN) -m nox

coverage: $(VENV)/.coverage-ready
	$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal --cov --cov-report=
	@$(RUN) -m coverage report | awk '/^brevact/ { n = split($$1, part, "/"); name = n > 2 ? part[2] : "(brevact)"; \
		all[name] += $$2; missed[name] += $$3 } END { for (name in all) printf "%-16s %5d statements, %5.1f %% run\n", \
		name, all[name], 100 * (1 - missed[name] / (all[name] + !all[name])) }' | sort
	@$(RUN) -m coverage report --format=total

lint: $(VENV)/.dev-ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --clean

$(VENV)/.%-ready: $(READY)
	$(INSTALL) -e '.[$*]'
	touch $@

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "brevact needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
		echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[test,models]'
	@$(RUN) -c 'import torchvision' 2>/dev/null || echo "torchvision does not fit this torch, so that programs with models of" \
		"transformers fail: $(RUN) -m pip uninstall torchvision, or install one that fits; recipes and tests work with both"
	touch $(READY)
