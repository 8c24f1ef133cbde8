# One environment in .venv serves every target; it is installed again only when pyproject.toml
# changes. `make venv EXTRAS=dev,cuda12` adds a GPU build of JAX.

VENV   ?= .venv
EXTRAS ?= dev
JOBS   ?= 2
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

# `make PYTHON=/path/to/python3.12 ...` reaches scripts/find_python.sh through the environment.
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench clean

help:
	@echo "make demo    answer a question about a long text with a real model"
	@echo "make test    lint, types and tests"
	@echo "make lint    ruff and pyright only"
	@echo "make bench   decode and prefill speed (benchmarks/dense.py)"
	@echo "make venv    only make the environment in $(VENV)"
	@echo "make clean   remove the environment and everything generated"

venv: $(STAMP)

# An existing environment is kept as it is; the project is installed into it.
$(PY):
	@python="$$(bash scripts/find_python.sh)" && echo "making $(VENV) with $$python" && \
	"$$python" -m venv $(VENV)

$(STAMP): pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)
	$(PY) examples/demo.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m pyright

test: lint
	$(PY) -m pytest -n $(JOBS) --dist loadfile

bench: $(STAMP)
	$(PY) benchmarks/dense.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
