# Plain commands; nothing else is needed than Python 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install serve test lint accept gpu-check mutate bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): a minute or two the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

serve: install
	$(BIN)/orchestrator serve

# two at a time what starts no service; then what does, alone: its waits are bounded
test: install
	$(BIN)/python -m pytest -m "not service" -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m service

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

accept: install
	$(BIN)/python -m tests.acceptance.main_job
	$(BIN)/python -m tests.acceptance.two_gateways
	$(BIN)/python -m tests.acceptance.checkpoint
	$(BIN)/python -m tests.acceptance.swap_storm
	$(BIN)/python -m tests.acceptance.sdk_clients
	$(BIN)/python -m tests.acceptance.crash_turns
	$(BIN)/python -m tests.acceptance.context_storm
	$(BIN)/python -m tests.acceptance.context_storm --window 20
	$(BIN)/python -m tests.acceptance.families
	$(BIN)/python -m tests.acceptance.kernels

gpu-check: install
	$(BIN)/python -m tests.acceptance.gpu_check

mutate: install
	$(BIN)/python -m tests.mutate

bench: install
	$(BIN)/orchestrator bench swap
	$(BIN)/orchestrator bench engine

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache .import_linter_cache
