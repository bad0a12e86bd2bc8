# Every target sets itself up: a virtual environment in .venv, made again when the requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test lint bench coverage format clean
help:  ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(STAMP): pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"supervise needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; try: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: on Debian, apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check $(if $(SUPERVISE_TORCH_INDEX),--extra-index-url $(SUPERVISE_TORCH_INDEX)) -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

demo: $(STAMP)  ## a run that is preempted, shot and lied to, and ends bit-identical (3 minutes)
	@$(BIN)/python examples/demo.py

test: $(STAMP)  ## the whole suite; `make test ARGS="-k signals"` for a part
	$(BIN)/python -m pytest -ra $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=supervisor:hooks $(BIN)/mypy -p supervise_daemon -p supervise_hooks

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
