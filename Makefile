# Each target does its own set-up: on a fresh machine `make demo` or `make test` is the first command.
PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/.venv
READY := .venv/.ready
TOOLS := .venv/.tools
PROGRAMS := .venv/.programs
SUPPLY := .venv/.supply
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint docs screenshots bench pythons audit licences sbom clean

demo: $(READY)
	$(BIN)/coterie demo

# Programs for tests are installed while pip works and code is checked. One thread per test process: processes that each
# use all cores spend their time waiting for each other. Of the four two begin with the tests of real Flower processes,
# and mostly wait.
test:
	@$(MAKE) --no-print-directory --jobs=2 lint $(PROGRAMS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 4

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(TOOLS)
	$(BIN)/mkdocs build --strict

screenshots: $(TOOLS) $(PROGRAMS)
	$(BIN)/python docs/screenshots.py

bench: $(TOOLS)
	$(BIN)/coterie bench speed
	$(BIN)/coterie bench scale
	$(BIN)/coterie bench attacks
	$(BIN)/coterie bench flower

# Installs the library for every Python that it supports and is here, and does the main job with each.
PYTHONS ?= python3.11 python3.12 python3.13
pythons:
	@for python in $(PYTHONS); do \
		command -v $$python >/dev/null || { echo "$$python: not here, skipped"; continue; }; \
		folder=.venvs/$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		{ $$python -m venv $$folder && $$folder/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt . \
			&& $$folder/bin/coterie demo --out $$folder/demo; } || exit 1; \
		echo "$$python: installed, demo done"; \
	done

# What is installed: known faults (asks the registry's advisories), licences, and a bill of materials (CycloneDX).
audit: $(SUPPLY)
	$(BIN)/pip-audit --skip-editable

licences: $(SUPPLY)
	$(BIN)/pip-licenses --format=markdown --order=license --with-urls --output-file=licences.md

sbom: $(SUPPLY)
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --output-file sbom.json

clean:
	rm -rf .venv .venvs licences.md sbom.json site demo runs .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV):
	$(PYTHON) -m venv .venv
	touch $@

$(READY): $(VENV) pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

# What tests, docs and benchmarks need besides the library.
$(TOOLS): $(READY)
	$(PIP) --editable ".[dev]"
	touch $@

$(SUPPLY): $(READY)
	$(PIP) pip-audit pip-licenses cyclonedx-bom
	touch $@

# For the tests of the proxy, of the CUDA kernels and of pages in a browser alone, which are skipped without: nothing here may fail.
$(PROGRAMS): $(VENV)
	@export PATH="$$PATH:/usr/sbin:/usr/local/sbin"; has() { command -v $$1 >/dev/null; }; \
	as_root="env DEBIAN_FRONTEND=noninteractive"; [ "$$(id -u)" = 0 ] || as_root="sudo -n $$as_root"; \
	missing=""; for name in nginx g++ chromium; do has $$name || missing="$$missing $$name"; done; \
	if [ -n "$$missing" ] && has apt-get && $$as_root true 2>/dev/null; then \
		echo "installing$$missing, for tests"; \
		{ $$as_root apt-get -qq update; $$as_root apt-get -qq install -y --no-install-recommends $$missing; } >/dev/null 2>&1; \
	fi; \
	if has nginx && has g++ && has chromium; then touch $@; else echo "without nginx, g++ or chromium: tests that need it are skipped"; fi
