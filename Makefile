# labkit: `make lab` and `make test` are all you need. Only relative paths here: make splits absolute ones at a space.

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
NOTEBOOKS ?= notebooks
TASK ?= ner
MODEL ?= gemma3-270m
MASK ?= bidirectional
OUT ?= runs/gpu
BUDGET ?= 15
DEVICE ?= cuda

VENV_PYTHON = .venv/bin/python
START = notebooks/00_start_here.ipynb
PYTEST = $(VENV_PYTHON) -m pytest
# One notebook's cells must stay in one kernel: in parallel only by file, in the order of tests/conftest.py.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=2
NBVAL = --nbval-lax --nbval-current-env --nbval-sanitize-with=tests/notebooks/nbval_sanitize.cfg \
	--nbval-kernel-startup-timeout=60 --nbval-cell-timeout=240 \
	$(foreach kind,student nbgrader,--ignore=notebooks/assignments/$(kind))
# Tests and the headless tour: small sizes, and no request leaves the machine unless the caller says so.
QUIET = env LABKIT_PROFILE="$${LABKIT_PROFILE:-ci}" HF_HUB_OFFLINE="$${HF_HUB_OFFLINE:-1}" PYTHONHASHSEED=0
# nbval kills its kernels, and what they meant to clear away stays: so it goes with the folder of the run.
CLEARED = kept="$$(mktemp -d)"; trap 'rm -rf "$$kept"' EXIT; trap 'exit 130' INT TERM; TMPDIR="$$kept"

# Bytecode is kept, also where a container says otherwise: every kernel and command of the tests would compile labkit anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lab lab-check test test-fast test-browser test-all lint format clean train-quick train-5fold train-5fold-9b gpu-day site notebooks cli-docs

help: ## show this list
	@echo "make TARGET   (PYTHON=python3.11 picks the Python, TORCH_INDEX=URL the index that torch comes from)"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: ## create or update .venv; does nothing when nothing changed
	@"$(PYTHON)" scripts/setup_env.py --torch-index "$(TORCH_INDEX)"

lab: setup ## open JupyterLab on the first notebook
	@$(VENV_PYTHON) -m jupyter trust notebooks/*.ipynb >/dev/null # or JupyterLab hides their saved pictures
	@echo "labkit: opening JupyterLab on $(START) (Ctrl+C twice to stop)"
	@$(VENV_PYTHON) -m jupyterlab $(START) $(LAB_ARGS)

lab-check: setup ## the same without a browser: JupyterLab serves the first notebook, and the whole tour runs
	@echo "labkit: starting JupyterLab without a browser"
	@$(VENV_PYTHON) scripts/check_jupyterlab.py $(START)
	@echo "labkit: executing the notebooks of the tour"
	@$(QUIET) $(VENV_PYTHON) -m labkit notebooks run

test: setup ## everything but the slow matrix: tests, and the notebooks compared with their outputs
	@echo "labkit: running the tests and the notebooks"
	@$(CLEARED) $(QUIET) $(PYTEST) $(PARALLEL) $(NBVAL) $(NOTEBOOKS) tests

test-fast: setup ## tests without notebooks and without real weights, under two minutes
	@echo "labkit: running the fast tests"
	@$(QUIET) $(PYTEST) $(PARALLEL) -m "not slow and not browser and not gemma and not matrix and not end_to_end" tests

test-browser: setup ## figures, widgets, pages and Jupyter in a real browser; installs Chromium with apt-get where it is missing
	@bash scripts/install_debian_packages.sh
	@echo "labkit: running the browser tests"
	@$(QUIET) LABKIT_BROWSER=required $(PYTEST) $(PARALLEL) -m "browser" tests/browser

test-all: setup ## everything, the slow matrix and the browser tests included
	@echo "labkit: running all tests and the notebooks"
	@$(CLEARED) $(QUIET) $(PYTEST) $(PARALLEL) $(NBVAL) --jaxtyping-packages=labkit,beartype.beartype -m "" $(NOTEBOOKS) tests

gpu-day: setup ## what a GPU shows in BUDGET minutes, into OUT (docs/gpu.md); DEVICE=cpu tries all stages with tiny models
	@$(VENV_PYTHON) benchmarks/gpu/day.py --output-dir "$(OUT)" --budget $(BUDGET) --device $(DEVICE) $(DAY_ARGS)

lint: setup ## ruff: rules and format, notebooks too; the order of the rooms; and the rules for committed notebooks
	@$(VENV_PYTHON) -m ruff check .
	@.venv/bin/lint-imports --no-cache >/dev/null || .venv/bin/lint-imports --no-cache
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) scripts/check_notebooks.py

format: setup ## let ruff mend what it can
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

train-quick: setup ## fine-tune gpt2-mini on the embedded entities, bidirectional: minutes on a CPU
	@$(VENV_PYTHON) -m labkit train $(TASK) --preset quick --output-dir runs/$(TASK)-quick --resume

train-5fold: setup ## five-fold cross-validation: TASK=ner MODEL=gemma3-270m MASK=bidirectional (hours on a CPU)
	@$(VENV_PYTHON) -m labkit train $(TASK) --model "$(MODEL)" --mask $(MASK) --folds 5 \
		--output-dir runs/$(TASK)-$(MASK)-5fold --resume

train-5fold-9b: setup ## the same with Gemma 2 9B and LoRA, for a GPU of 40 GB; accept the licence on the hub first
	@$(VENV_PYTHON) -m labkit train $(TASK) --model google/gemma-2-9b --method lora --gradient-checkpointing --mask $(MASK) \
		--batch-size 2 --gradient-accumulation 8 --learning-rate 1e-4 --folds 5 \
		--output-dir runs/$(TASK)-$(MASK)-5fold-9b --resume

site: setup ## the tour, the playground, the guides and the API reference as static pages, in build/site
	@$(VENV_PYTHON) -c "import furo, myst_nb" 2>/dev/null || $(VENV_PYTHON) -m pip install -q -c constraints.txt -e ".[site]"
	@$(VENV_PYTHON) scripts/build_site.py

notebooks: setup ## execute the notebooks for committing, with a PNG beside each figure for pages without JavaScript
	@bash scripts/install_debian_packages.sh
	@$(QUIET) PLOTLY_RENDERER=plotly_mimetype+png $(VENV_PYTHON) -m labkit notebooks run $(NOTEBOOKS) --output-dir notebooks

cli-docs: setup ## write docs/cli.md, the reference of the commands, from their --help
	@$(VENV_PYTHON) -m typer labkit.cli utils docs --name labkit --output docs/cli.md \
		--title "Command-line reference, generated by \`make cli-docs\`"

clean: ## remove .venv and everything that was built; your notebooks and data stay
	@echo "labkit: removing .venv, build outputs and caches"
	@rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
