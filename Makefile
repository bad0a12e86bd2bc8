# Every target sets itself up: a virtual environment in .venv, made again when the requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Ranks and data workers share few cores here: one thread each.
export OMP_NUM_THREADS ?= 1
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help demo test lint bench coverage format clean
help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# Nothing is installed outside $(VENV). SUPERVISE_TORCH_INDEX: an extra package index, e.g. of torch's CPU wheels, where the usual one
# has only CUDA's. A real Slurm for `-m slurm` is set up by a target of its own, when there are such tests.
$(STAMP): pyproject.toml requirements-dev.txt
	@command -v $(PYTHON) >/dev/null || { echo "supervise needs Python 3.11 or newer: $(PYTHON) is not there; try: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"supervise needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; try: make PYTHON=python3.11")'
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "cannot make a virtual environment: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV), once"
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(SUPERVISE_TORCH_INDEX),--extra-index-url $(SUPERVISE_TORCH_INDEX)) -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

demo: $(STAMP)  ## a run that is preempted, shot and lied to, and ends bit-identical (3 minutes)
	@$(BIN)/python examples/demo.py

test: $(STAMP)  ## the whole suite; `make test ARGS="-k signals"` for a part
	$(BIN)/python -m pytest -ra $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## put the code into its form
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format --quiet .

bench: $(STAMP)  ## costs and speeds beside their budgets; writes benchmarks/results.json
	$(BIN)/python benchmarks/run.py $(ARGS)

coverage: $(STAMP)  ## the suite without the long drills, with branch coverage
	$(BIN)/coverage run -m pytest -m "not e2e" $(ARGS)
	$(BIN)/coverage report

clean:  ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .coverage htmlcov
