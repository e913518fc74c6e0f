# Each target does its own set-up: on a fresh machine `make demo` or `make test` is the first command.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TOOLS := .venv/.tools
PROGRAMS := .venv/.programs
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint docs screenshots bench clean

demo: $(READY)
	$(BIN)/coterie demo

# One thread per test process: processes that each use all cores spend their time waiting for each other. Of the three
# two begin with the tests of real Flower processes, and mostly wait.
test: lint $(PROGRAMS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(TOOLS)
	$(BIN)/mkdocs build --strict

screenshots: $(PROGRAMS)
	$(BIN)/python docs/screenshots.py

bench: $(TOOLS)
	$(BIN)/coterie bench speed
	$(BIN)/coterie bench scale
	$(BIN)/coterie bench attacks
	$(BIN)/coterie bench flower

clean:
	rm -rf .venv site demo runs .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

# What tests, docs and benchmarks need besides the library.
$(TOOLS): $(READY)
	$(PIP) --editable ".[dev]"
	touch $@

# For the tests of the proxy, of the CUDA kernels and of pages in a browser alone, which are skipped without: nothing here may fail.
$(PROGRAMS): $(TOOLS)
	@export PATH="$$PATH:/usr/sbin:/usr/local/sbin"; has() { command -v $$1 >/dev/null; }; \
	as_root="env DEBIAN_FRONTEND=noninteractive"; [ "$$(id -u)" = 0 ] || as_root="sudo -n $$as_root"; \
	missing=""; for name in nginx g++ chromium; do has $$name || missing="$$missing $$name"; done; \
	if [ -n "$$missing" ] && has apt-get && $$as_root true 2>/dev/null; then \
		echo "installing$$missing, for tests"; \
		{ $$as_root apt-get -qq update; $$as_root apt-get -qq install -y --no-install-recommends $$missing; } >/dev/null 2>&1; \
	fi; \
	if has nginx && has g++ && has chromium; then touch $@; else echo "without nginx, g++ or chromium: tests that need it are skipped"; fi
