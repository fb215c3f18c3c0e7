# Two commands on a fresh machine that has Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_DIR ?= demo
DEMO_BUDGET ?= 120
# Two at a time: a test that tunes has workers and threads of its own.
TEST_JOBS ?= 2

.PHONY: demo test test-fast test-peers lint tutorials clean help

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

demo: $(VENV)/.installed ## tune SqueezeNet on this machine's CPU, with a report
	$(BIN)/eqtune tune zoo:squeezenet --budget $(DEMO_BUDGET) --work-dir $(DEMO_DIR) \
		--report $(DEMO_DIR)/report.html --export $(DEMO_DIR)/squeezenet.so

test: $(VENV)/.installed-dev ## all tests but those that tune with a peer's tuner
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile -m "not peers and not alone"
	$(BIN)/python -m pytest -m alone

test-fast: $(VENV)/.installed-dev ## the tests that take seconds
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile -m "not slow"

test-peers: $(VENV)/.installed-dev ## the tests that tune with MetaSchedule
	$(BIN)/python -m pytest -m peers

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# The folders have other names than the packages (docs/architecture.md), so types are checked where they are installed.
	rm -rf build && $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/typed .
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p eqtune

tutorials: $(VENV)/.installed-dev ## run every tutorial
	set -e; for script in tutorials/[0-9]*.py; do echo "== $$script"; $(BIN)/python $$script; done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean: ## remove the environment, caches and demo results
	rm -rf $(VENV) $(DEMO_DIR) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
