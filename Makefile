# Everything a contributor runs. The environment is made once and again when its inputs change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# One BLAS thread a process: tests and demo start several ranks on few cores.
export OMP_NUM_THREADS ?= 1

# Images of containers switch bytecode off: then each of the many interpreters compiles all anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test soak demo drawing lint lint-quick bench matrix pages clean

# A file each at a time, in the order of tests/conftest.py. One worker more than two cores: much of
# the suite waits. mypy, which takes a minute the first time, runs beside it; what it finds is
# printed last, and without findings the log ends with the summary of the tests.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: lint-quick
	@mkdir -p build; $(BIN)/mypy > build/mypy.log 2>&1 & types=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$types || { cat build/mypy.log; exit 1; }; exit $$tests

# What is too long for every run: the whole zoo of libraries, and the large numbers of rounds and
# examples of which `make test` tries a sample (tests/_samples.py).
soak: $(STAMP)
	SOAK=1 $(PYTEST) -m "soak or sampled or hypothesis"

lint: lint-quick
	$(BIN)/mypy

lint-quick: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py

# The rooms of the core and the imports between them: docs/rooms.md.
drawing: $(STAMP)
	$(BIN)/python docs/draw_rooms.py

# A small version of all benchmarks, in minutes; docs/performance.md says what makes its numbers.
bench: $(STAMP)
	$(BIN)/python benchmarks/all.py --small --out build/bench

# A part of the suite on other versions of torch, Lightning and Accelerate; docs/compatibility.md.
matrix: $(STAMP)
	$(BIN)/python tests/matrix.py

# What is made from data: the fields of the configuration, and docs/reference. Tests compare it.
pages: $(STAMP)
	$(BIN)/python -m tests.api._config
	$(BIN)/python -m tests.api._reference

# The constraint holds for the build environment too, where hatchling is installed. A virtual
# environment whose making was cut short has no stamp and is made anew.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
