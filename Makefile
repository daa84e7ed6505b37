# make demo      train the packaged model on the CPU and write a report
# make test      lint, types and the whole CPU test suite
# make check     lint and types alone
# make test-gpu  tests that need a CUDA device
# make bench     tests and all benchmarks on a CUDA device, into measured/ (GPUS=0,1, SECONDS=600)
# make docs      regenerate docs/config.md and docs/metrics.md
#
# Each target first makes .venv and installs into it, once for each state of pyproject.toml and constraints.txt.
# PYTHON=/path/to/python uses that interpreter as it is: nothing is created or installed.

VENV := .venv

ifeq ($(strip $(PYTHON)),)
  PY      := $(VENV)/bin/python
  RUNTIME := $(VENV)/.installed-runtime
  DEV     := $(VENV)/.installed-dev
else
  PY      := $(PYTHON)
  RUNTIME :=
  DEV     :=
endif

CANDIDATES := python3 python3.13 python3.12 python3.11

.PHONY: demo test check test-gpu bench docs
.DEFAULT_GOAL := test

demo: $(RUNTIME)
	@name=demo; if [ -e runs/demo ]; then name=demo-$$(date +%Y%m%d-%H%M%S); fi; \
	$(PY) -m qerl train configs/demo.yaml run.name=$$name

test: check
	$(PY) -m pytest -n 2 --dist worksteal

check: $(DEV)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

test-gpu: $(DEV)
	$(PY) -m pytest -m gpu

bench: $(DEV)
	$(PY) scripts/measure.py $(if $(GPUS),--gpus $(GPUS)) $(if $(SECONDS),--seconds $(SECONDS))

docs: $(DEV)
	$(PY) -m qerl.config.docs > docs/config.md.tmp && mv docs/config.md.tmp docs/config.md
	$(PY) -m qerl.metrics.catalogue > docs/metrics.md.tmp && mv docs/metrics.md.tmp docs/metrics.md

# The stamp is written only after pip has finished, so an interrupted installation is done again.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@base=; for candidate in $(CANDIDATES); do \
	  if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then base=$$candidate; break; fi; \
	done; \
	if [ -z "$$base" ]; then echo "make: no Python >= 3.11 with venv among: $(CANDIDATES)" >&2; exit 1; fi; \
	$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $$base -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[$(EXTRA)]'
	@touch $@

$(VENV)/.installed-runtime: EXTRA := report
$(VENV)/.installed-dev: EXTRA := dev
