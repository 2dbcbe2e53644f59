# Everything a contributor runs. The environment is made once and again when its inputs change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# One BLAS thread a process: tests and demo start several ranks on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: test soak demo lint bench matrix clean

# Lint first: it is quick. The suite comes last, so that the log ends with its summary. Two workers,
# a file each at a time: much of the suite waits for processes to start.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# What is too long for every run: the whole zoo of libraries, and the large numbers of rounds and
# examples of which `make test` tries a sample (tests/_samples.py).
soak: $(STAMP)
	DIST_CKPT_SOAK=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "soak or sampled or hypothesis"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

demo: $(STAMP)
	$(BIN)/python examples/demo/run.py

# A small version of all benchmarks, in minutes; docs/performance.md says what makes its numbers.
bench: $(STAMP)
	$(BIN)/python benchmarks/all.py --small --out build/bench

# A part of the suite on other versions of torch, Lightning and Accelerate; docs/compatibility.md.
matrix: $(STAMP)
	$(BIN)/python tests/matrix.py

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
