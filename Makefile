# `make demo` and `make test` set up everything they need by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm gallery bundle test test-slurm lint unit end-to-end faults lock schema clean

help:
	@echo 'make demo        run the demo sweep and print its comparison'
	@echo "make demo-vllm   the same with vLLM's CPU build, LMCache and Mooncake: 5 to 10 GB, a quarter of an hour"
	@echo 'make test        lint and run all tests but those on Slurm'
	@echo 'make test-slurm  install Slurm with apt if it is not there, and run the tests on a real one-node cluster'
	@echo 'make gallery     redraw all figures and reports of the committed example into results/gallery/'
	@echo 'make bundle ENGINE=vllm [CONFIG=... NODE=... PART_MB=60]'
	@echo '                 pack what a node without a network needs to measure the points of a config'
	@echo 'make lock        pin the dependencies of pyproject.toml anew'
	@echo 'make clean       remove environments and results'

define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@[ -x $(BIN)/python ] && $(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo 'This Python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^uv==' requirements.lock)
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --requirements $<
	@touch $@
endef

$(VENV)/run: requirements.lock
	@echo 'Preparing $(VENV) (once) ...'
	$(environment)

$(VENV)/test: requirements-dev.lock | $(VENV)/run
	@echo 'Preparing $(VENV) for the tests (once) ...'
	$(environment)

# flock: whoever holds it is the only demo here, so a lock that a killed Snakemake left behind can be removed.
define sweep
	@flock --nonblock --close $(VENV)/demo.lock $(SHELL) -c '\
	  { [ -z "$$(ls -A .snakemake/locks 2>/dev/null)" ] || $(BIN)/snakemake --unlock --quiet all; } && \
	  $(BIN)/snakemake --cores all --rerun-incomplete --quiet host reason rules $(1) && \
	  { [ results/snakemake-report.html -nt results/summary.md ] || \
	    $(BIN)/snakemake --report results/snakemake-report.html --quiet all $(1); }' \
	  || { [ $$? -ne 1 ] || echo 'The demo did not finish, or another one is running here.' >&2; exit 1; }
	@cat results/summary.md
	@echo; echo 'Figures: results/figures/   Report: results/report.html   Table: results/metrics.csv'
endef

demo: $(VENV)/run
	$(call sweep)

# uv looks for PyTorch's wheel without CUDA where PyTorch publishes it, or in the folder that UV_FIND_LINKS names.
ifndef UV_FIND_LINKS
demo-vllm: export UV_TORCH_BACKEND ?= cpu
endif
demo-vllm: $(VENV)/run
	@PATH="$$PATH:/usr/sbin:/sbin" ldconfig -p | grep -q 'libibverbs\.so\.1' || \
	  { echo 'Mooncake needs libibverbs; on Debian and Ubuntu: apt-get install libibverbs1' >&2; exit 1; }
	$(call sweep,--keep-going --configfile configs/demo-vllm/config.yaml)

gallery: $(VENV)/run
	$(BIN)/python -m tests.examples.gallery results/gallery

CONFIG ?= docs/examples/h200/configs/config.yaml
NODE ?= $(dir $(firstword $(CONFIG)))node.yaml
PART_MB ?= 60

bundle: $(VENV)/run
	@[ -n '$(ENGINE)' ] || { echo 'Say which points: make bundle ENGINE=vllm' >&2; exit 1; }
	@$(BIN)/python -m workflow.bundle --engine $(ENGINE) --configfile $(CONFIG) --node $(NODE) \
	  --part-bytes $(PART_MB)000000 --out .bundle

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint

unit: $(VENV)/test
	$(BIN)/python -m pytest tests/unit tests/parity tests/benchmarks

end-to-end: $(VENV)/test
	$(BIN)/python -m pytest tests/end_to_end

faults: $(VENV)/test
	$(BIN)/python -m pytest tests/faults

test: lint unit end-to-end faults

ifneq (,$(filter test,$(MAKECMDGOALS)))
# With --jobs: the cheap ones first, and the faults alone, since others would trip over what they break.
unit: | lint
test-slurm: | unit
faults: | unit end-to-end $(filter test-slurm,$(MAKECMDGOALS))
endif

test-slurm: $(VENV)/test
	@PATH="$$PATH:/usr/sbin" command -v slurmctld > /dev/null || tests/slurm/cluster.sh install
	$(BIN)/python -m pytest tests/slurm

lock: $(VENV)/run
	$(BIN)/uv pip compile --universal --python-version 3.11 --no-annotate --quiet --custom-compile-command 'make lock' \
	  pyproject.toml --output-file requirements.lock
	$(BIN)/uv pip compile --universal --python-version 3.11 --no-annotate --quiet --custom-compile-command 'make lock' \
	  --extra dev --constraint requirements.lock pyproject.toml --output-file requirements-dev.lock

schema: $(VENV)/run
	$(BIN)/python -c "from workflow.config import config_schema; print(config_schema(), end='')" > configs/config.schema.json

clean:
	rm -rf $(VENV) .envs .bundle .snakemake results/*/ results/*.*sv results/*.parquet results/*.html results/summary.md
