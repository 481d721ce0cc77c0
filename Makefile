# Each target sets up what it needs, once; `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# NVIDIA Resiliency Extension has wheels for Python 3.10 to 3.12: the first of these that fits is used.
FITS := import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.11 python3.10,\
	$(shell $(p) -c '$(FITS)' >/dev/null 2>&1 && echo $(p))))
BIN := .venv/bin
READY := .venv/.ready

PACKAGE := $(shell find companion/ridethrough -name '*.py')
NOTEBOOKS := $(wildcard notebooks/[0-9]*.ipynb)
EXECUTED := $(NOTEBOOKS:notebooks/%=_build/source/notebooks/%)
PAGES := _config.yml $(shell find book -type f -not -path '*/__pycache__/*')
SITE := _build/html/index.html

.PHONY: help setup test-tools book test test-code test-pages lab notebooks bench clean

help:  ## List the targets
	@echo 'make TARGET, where TARGET is one of'
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(READY)  ## Python environment in .venv

book: setup $(SITE)  ## Run every notebook and build the site: _build/html/index.html
	@echo 'The book: $(SITE)'

test: test-code test-pages  ## Check everything, the quick first: code, ranks, crash points, notebooks, site
	@$(BIN)/python tests/summary.py _build/tests/*.xml

test-code: setup test-tools  ## Check the code alone: lint, types, units, real ranks, crash points
	@rm -rf _build/tests
	$(BIN)/python -m pytest -m 'not (notebooks or book)' --junitxml=_build/tests/code.xml

test-pages: book test-tools  ## Check the notebooks and the built site, in Chromium
	$(BIN)/python -m pytest -m 'notebooks or book' --junitxml=_build/tests/pages.xml

lab: setup  ## Open the notebooks in JupyterLab
	$(BIN)/python -m jupyterlab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: setup $(EXECUTED)  ## Run the notebooks and store what they print, for git
	cp -p $(EXECUTED) notebooks/
	$(BIN)/python book/_tools/picture.py

bench: setup  ## Measure what a checkpoint costs, and what each kind of fault does, on this machine
	@mkdir -p _build/bench
	$(BIN)/python -m ridethrough.bench stall --dir _build/bench --json _build/bench/stall.json
	$(BIN)/python -m ridethrough.bench drills --dir _build/bench --json _build/bench/drills.json

clean:  ## Remove all that was made here, the environment as well
	rm -rf .venv _build notebooks/runs companion/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

test-tools:
	@.ci/system-packages chromium strace iproute2

$(READY): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo 'This needs Python 3.10, 3.11 or 3.12: install one, or name it with' \
		'make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@.ci/system-packages python3-venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

_build/source/notebooks/%.ipynb: notebooks/%.ipynb book/_tools/run_notebooks.py $(PACKAGE) $(READY)
	$(BIN)/python book/_tools/run_notebooks.py --only $*

# All pages anew each time: a warning in a page that Sphinx remembers would fail one build and pass the next.
$(SITE): $(EXECUTED) $(PAGES) $(READY)
	rm -rf _build/html
	ln -sfn ../../book _build/source/book
	$(BIN)/jupyter-book build _build/source --path-output . --config _config.yml --toc book/_toc.yml \
		--all -W -n --keep-going --quiet
