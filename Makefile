# Two commands do everything: `make serve` and `make test`. Needs Python 3.11+, git and make.

PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
FUZZ_SECONDS ?= 600
FUZZ_RUNS ?= 100000

BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := pyproject.toml constraints.txt

# Nothing here calls home.
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1
# Lines of loading progress differ in their numbers alone; Ray would fold them into one.
export RAY_DEDUP_LOGS := 0

.DEFAULT_GOAL := help
.PHONY: help serve test test-peers test-hosts lint fuzz bench chaos train-demo clean

help:
	@echo "make serve       serve $(CONFIG) on port 8000"
	@echo "make test        lint, types, import rules, all tests"
	@echo "make test-peers  files and errors against llama-cpp-python, which it builds: minutes"
	@echo "make test-hosts  a cluster of two hosts, one of which is cut off; as root: two minutes"
	@echo "make lint        the first three of these"
	@echo "make fuzz        search for model files that do harm, FUZZ_SECONDS=$(FUZZ_SECONDS) long"
	@echo "make bench       measure against llama-cpp-python, write bench/RESULTS.md"
	@echo "make chaos       kill parts of a cluster under 64 streams; fails if one is lost: 3 minutes"
	@echo "make train-demo  train models/demo.gguf again"
	@echo "make clean       remove .venv and caches"

# Checked first, because Serve logs a mistake and goes on waiting. `exec`: Ctrl-C reaches Serve
# itself, which ends every process that it started.
serve: .venv/installed
	@$(BIN)/python -m serve_app.check $(CONFIG)
	@exec $(BIN)/serve run $(CONFIG)

# Those that start clusters come alone: what they wait for takes its time.
test: lint
	$(BIN)/pytest --ignore tests/serve --numprocesses $(WORKERS)
	$(BIN)/pytest tests/serve

test-peers: .venv/installed-test .venv/installed-bench
	$(BIN)/pytest tests/peers --timeout 300

# Makes network namespaces, so it has to be root.
test-hosts: .venv/installed-test
	$(BIN)/pytest tests/hosts

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Ends after so many seconds or files, whichever comes first; what it finds stays in .cache/fuzz.
fuzz: .venv/installed-fuzz
	$(BIN)/python -m tests.fuzz $(FUZZ_SECONDS) $(FUZZ_RUNS) .cache/fuzz

bench: .venv/installed-bench
	$(BIN)/python -m bench $(BENCH)

chaos: .venv/installed
	$(BIN)/python -m bench.chaos $(CHAOS)

train-demo: .venv/installed-train
	@mkdir -p .cache
	$(BIN)/python -m tools.train_demo --checkpoint .cache/demo-training.pt

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: an install happens once for each state of pyproject.toml and constraints.txt.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say which with PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/installed: $(INSTALLED) | .venv/bin/pip
	@echo "installing into .venv (once)"
	$(PIP) -e .
	@touch $@

.venv/installed-%: $(INSTALLED) | .venv/bin/pip
	@echo "installing into .venv (once)"
	$(PIP) -e '.[$*]'
	@touch $@ .venv/installed
