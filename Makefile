# Works on a machine with Python 3.11 (or newer) and make; everything else goes into .venv.
# `make` alone explains itself. The installation itself is tools/setup.sh.

SHELL = /bin/sh
BIN = .venv/bin
# A file stays with one worker, because its tests share what it has trained; long files come first (pyproject.toml).
PYTEST = $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# What runs in processes that the tests start, where lines are not counted.
FAR = */nn/exchange.py,*/nn/parallel.py,*/nn/sharding.py

# Tests start many processes, which import torch in 3 seconds with its byte code and in 16 without.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo quick test coverage test-all lint docs bench tables dist constraints dev-env
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@echo "ermoe: mixtures of experts that route by their own eigenbasis"
	@echo
	@echo "  make demo     start here: a ViT learns digits, becomes sparse, ends faster; writes runs/demo/report.html"
	@echo "  make quick    while working: unit tests and doctests, about a minute"
	@echo "  make test     everything a change must pass: lint, types, import contract, site, tests, examples; 8 minutes"
	@echo "  make test-all the same, lines counted, and what needs a browser, other installations or much time"
	@echo "  make lint     only the quick checks: ruff, codespell, mypy, import-linter"
	@echo "  make docs     the site in docs/_build/html; RUN=1 also runs the examples of its gallery"
	@echo "  make bench    every benchmark of docs/results/performance.md, beside the peers: about an hour of an idle machine"
	@echo "  make tables   write the tables of README.md and docs/ from the records in benchmarks/results"
	@echo "  make dist     build the wheel and the source archive into dist/, the same bytes for the same commit"
	@echo "  make setup    only install; EXTRAS=\"brain clip\" adds what those need"
	@echo
	@echo "Each of them makes .venv first if need be, once: about 3.1 GB to download and 6 GB on disk"
	@echo "(test and lint: 3.2 and 6.5). PYTHON=python3.12 picks another Python. Afterwards: $(BIN)/ermoe --help"

setup:
	@sh tools/setup.sh base $(EXTRAS)

dev-env:
	@sh tools/setup.sh dev

demo: setup
	$(BIN)/ermoe demo

lint: dev-env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports --no-logo

quick: dev-env
	$(PYTEST) -q tests/unit src

test: lint docs
	$(PYTEST) --durations=30
	$(BIN)/python examples/run_all.py

# The same tests while lines are counted, which takes Python half as long again.
coverage: dev-env
	$(PYTEST) --cov --cov-report=
	$(BIN)/coverage report --fail-under=90
	$(BIN)/coverage report --include='*/ermoe/nn/*' --omit='$(FAR)' --fail-under=98

test-all: lint coverage
	$(MAKE) docs RUN=1
	$(PYTEST) tests/system
	$(BIN)/python examples/run_all.py

# Strict: a broken link, an undocumented public name or option, or a name that does not exist ends it.
docs: dev-env
	ERMOE_DOCS_RUN=$(RUN) $(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet --jobs auto \
		--fresh-env -d docs/_build/doctrees docs docs/_build/html

bench:
	@sh tools/setup.sh bench
	$(BIN)/ermoe bench all --threads 2

tables: dev-env
	$(BIN)/python benchmarks/tables.py

# Whoever builds a commit gets the same files: times in them are the commit's, the build tools are pinned.
dist: dev-env
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/uv build --clear --build-constraints constraints.txt

# Pins stay as they are unless a range in pyproject.toml forbids them; UPGRADE=--upgrade takes the newest of all.
constraints: dev-env
	printf '%s\n' uv hatchling hatch-fancy-pypi-readme editables | $(BIN)/uv pip compile pyproject.toml - --all-extras $(UPGRADE) \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--no-header --no-annotate --no-emit-index-url --output-file constraints.txt
