# make run    set up, then work notebooks 00 and 03 headless: the main job
# make test   set up, then pass the tests
# make lab    set up, then open JupyterLab on 00
# make kernel set up, then register this environment with a JupyterLab that already runs
# make audit  judge the gates: every mutant and fake must die (about 25 minutes on 2 quiet cores)
# PYTHON=...  the Python to build on; a torch that it already imports is used, never replaced

PYTHON ?= python3
VENV ?= .venv
LAB := $(VENV)/bin/python -m metainfer_lab
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root,)

.PHONY: run test setup lab kernel audit notebooks lint
.DEFAULT_GOAL := run

setup:
	@$(PYTHON) metainfer_lab/bootstrap.py $(VENV)

run: setup
	@$(LAB) notebooks 00_start_here 03_agent_generation
	@echo "next: 'make lab' opens the notebooks; 'make kernel' adds them to a JupyterLab that runs"

test: setup
	$(VENV)/bin/python -m pytest
	$(VENV)/bin/python -m pytest --timeout 1200 --nbval-lax --nbval-current-env \
		--nbval-sanitize-with tests/nbval.cfg --ignore notebooks/out --ignore notebooks/scratch notebooks

lab: setup
	$(VENV)/bin/python -m jupyterlab $(ROOT_FLAG) notebooks/00_start_here.ipynb

kernel: setup
	$(VENV)/bin/python -m ipykernel install --user --name metainfer-lab --display-name "metainfer_lab"

audit: setup
	@$(LAB) audit

notebooks: setup
	@$(LAB) notebooks

lint: setup
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
