# One environment in .venv serves every target; it is installed again only when pyproject.toml
# changes. `make venv EXTRAS=dev,cuda12` adds a GPU build of JAX.

VENV   ?= .venv
EXTRAS ?= dev
JOBS   ?= 2
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
WHEELS := $(VENV)/gpu-check/.installed

# `make PYTHON=/path/to/python3.12 ...` reaches scripts/find_python.sh through the environment.
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint bench gpu-check-wheels check-gpus clean

help:
	@echo "make demo    answer a question about a long text with a real model"
	@echo "make test    lint, types and tests"
	@echo "make lint    ruff and pyright only"
	@echo "make check-gpus  compile every kernel for every card (needs no GPU)"
	@echo "make bench   decode and prefill speed (benchmarks/dense.py, attention.py)"
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

# The CUDA compilers that tests/test_aot.py needs; they need no GPU and no driver.
gpu-check-wheels: $(WHEELS)

$(WHEELS): $(STAMP) scripts/gpu_check_wheels.py
	$(PY) scripts/gpu_check_wheels.py $(dir $@)
	@touch $@

check-gpus: $(WHEELS)
	$(PY) -m pallas_kernels.report

test: lint $(WHEELS)
	$(PY) -m pytest -n $(JOBS) --dist loadfile

bench: $(STAMP)
	$(PY) benchmarks/dense.py
	$(PY) benchmarks/attention.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
