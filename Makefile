# Each target does its own set-up: on a fresh machine `make demo` or `make test` is the first command.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint docs bench clean

demo: $(READY)
	$(BIN)/coterie demo

# One thread per test process: two processes that each use all cores spend their time waiting for each other.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/coterie bench speed
	$(BIN)/coterie bench scale

clean:
	rm -rf .venv site demo runs .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@
