# Two commands set everything up, each making .venv where it is missing: `make study` and `make test`.
.PHONY: study test lint clean
.DELETE_ON_ERROR:

PYTHON ?= python3
export PIP_DISABLE_PIP_VERSION_CHECK = 1
INSTALL = .venv/bin/python -m pip install --quiet --progress-bar off --constraint constraints.txt --editable

study: .venv/installed
	.venv/bin/energylab run quickstart
	.venv/bin/energylab figures --study quickstart

test: .venv/installed-dev
	.venv/bin/python -m energylab.kernels.compile_all
	TRITON_INTERPRET=1 .venv/bin/python -m pytest -n auto -m interpreter tests/kernels
	.venv/bin/python -m pytest -n auto -m "not slow"

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing energylab into .venv (about a minute)"
	$(INSTALL) .
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing energylab and its test tools into .venv (about a minute)"
	$(INSTALL) '.[dev,triton,ray]'
	touch $@ .venv/installed
