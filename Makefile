.DEFAULT_GOAL := help
.PHONY: help book serve test test-gpu fuzz sanitize targets lint bench tune browser status address linkcheck strip clean

VENV := .venv
BIN := $(VENV)/bin
BOOK := _build/html/index.html
CACHE := _build/.jupyter_cache
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))
SOURCES := $(NOTEBOOKS) $(wildcard *.yml book/*.md book/*.bib book/_static/* book/_ext/*.py flashattn/*.py flashattn/integrations/*.py flashattn/*.js flashattn/data/*)
GPU_TESTS := $(addprefix tests/test_,kernels.py api.py ops.py sdpa.py cases.py properties.py doctor.py gpt.py module.py transformers.py atomic.py decode.py paged.py fp8.py sparse.py)
JOBS ?= $(shell python3 -c 'import os; print(min(os.cpu_count(), 8))')
# One thread a process: two notebooks or test workers side by side would otherwise fight over the cores.
export OMP_NUM_THREADS ?= 1
# The first Python from 3.11 to 3.13; name another with PYTHON=...
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/installed: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 found: install one, or say make PYTHON=/path/to/python"; exit 1; }
	@echo "== Setting up $(VENV) with $$($(PYTHON) --version) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

book: $(BOOK)  ## execute the notebooks and build the site
	@echo "== The book is at $(BOOK)"

$(BOOK): $(VENV)/installed $(SOURCES)
	@echo "== Executing $(words $(NOTEBOOKS)) notebooks, $(JOBS) at a time (unchanged ones come from the cache)"
	@$(BIN)/python book/_ext/execute.py --cache $(CACHE) --jobs $(JOBS) $(NOTEBOOKS)
	@echo "== Building the site"
	@$(BIN)/jupyter-book build . --all -W -n --keep-going --quiet
	@touch $@

serve: book  ## build, then serve the site on localhost
	@echo "== http://localhost:8000 (Ctrl-C stops it)"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html 8000

test: $(VENV)/installed book  ## build if needed, then run every test
	@$(BIN)/python tests/browser.py
	@echo "== Tests of the package and the site"
	@$(BIN)/python -m pytest tests -q -n $(JOBS) --dist worksteal
	@echo "== Notebooks, each cell, pinned outputs compared"
	@$(BIN)/python -m pytest --nbval-lax notebooks -q -n $(JOBS) --dist loadfile

test-gpu: $(VENV)/installed  ## run the kernel tests on this machine's GPU and record them
	@$(BIN)/python -m pytest $(GPU_TESTS) -q -n $(JOBS) --results tests/results/kernels.json
	@$(BIN)/python -m pytest --nbval-lax notebooks -q -n $(JOBS) --dist loadfile --results tests/results/notebooks.json

fuzz: $(VENV)/installed  ## draw N random cases and hold them to the error budget (N=200)
	@$(BIN)/python -m flashattn.fuzz --cases $(or $(N),200)

sanitize: $(VENV)/installed  ## run the kernels under compute-sanitizer on this machine's GPU
	@$(BIN)/python tests/sanitize.py --out tests/results/sanitizer.json

targets: $(VENV)/installed  ## compile every kernel for every target and record it in flashattn/data
	@$(BIN)/python tests/compile_kernels.py --table
	@$(BIN)/python tests/compile_kernels.py --sweep
	@$(BIN)/python tests/compile_hopper.py --table

lint: $(VENV)/installed  ## check style, spelling and the numbers in the prose
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check flashattn tests book
	@$(BIN)/python -m pytest tests/test_prose.py --noconftest -q -n 0

bench: $(VENV)/installed  ## measure beside the others on this machine's GPU (ARGS="--suite core --resume")
	@$(BIN)/python -m flashattn.bench $(ARGS)

tune: $(VENV)/installed  ## search this machine's GPU for faster blocks (ARGS="--head-dim 128 --causal")
	@$(BIN)/python -m flashattn.tune $(ARGS)

browser: $(VENV)/installed book  ## test the site in a browser and record it (CHROMIUM=/path names one)
	@$(BIN)/python tests/browser.py
	@$(BIN)/python -m pytest tests/test_browser.py -q -n 0 -k first_view --results tests/results/first_view.json
	@$(BIN)/python -m pytest tests/test_browser.py -q -n $(JOBS) -k "not first_view" --results tests/results/browser.json

status: $(VENV)/installed  ## render the status page, README's table and the ledger from what was recorded
	@$(BIN)/python book/_ext/status.py
	@$(BIN)/python book/_ext/ledger.py

address: $(VENV)/installed  ## set where the book is published (URL=https://github.com/owner/name, or URL=)
	@$(BIN)/python book/_ext/address.py "$(URL)"

linkcheck: $(VENV)/installed  ## check external links (needs the network)
	@$(BIN)/jupyter-book build . --builder linkcheck

strip: $(VENV)/installed  ## execute the notebooks in place and strip all outputs but the pinned ones
	@$(BIN)/python book/_ext/execute.py --in-place --jobs $(JOBS) $(NOTEBOOKS)

clean:  ## remove what was built, but not the virtual environment
	rm -rf _build build dist *.egg-info
