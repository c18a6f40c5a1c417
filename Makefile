# Everything is run from .venv, which is made on first use. Needed: make, Python >= 3.10 and a C++ compiler.

PYTHON ?= python3

# Inductor compiles C++ with $CXX or else g++. make gives CXX a default of its own, which says nothing of this machine.
ifeq ($(origin CXX),default)
CXX := $(firstword $(foreach name,g++ clang++ c++,$(if $(shell command -v $(name) 2>/dev/null),$(name))))
endif
export CXX

# Inductor hands torch's folder to the linker unquoted, so where the path has spaces .venv is used through a link that
# has none.
ifeq ($(words $(CURDIR)),1)
VENV := .venv
else
VENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/remat/venv-$(firstword $(shell pwd | cksum))
endif
PY := $(VENV)/bin/python

# One worker a core and one thread a worker: OpenMP threads of two workers would spin against each other. At most 4,
# because a worker that compiles takes up to 2 GB.
PYTEST_WORKERS ?= -n auto --maxprocesses 4 --dist loadfile

.PHONY: help demo test lint bench clean compiler venv
.DEFAULT_GOAL := help

help: ## show this text
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name what; do \
		printf '  make %-6s %s\n' "$$name" "$$what"; done

demo: compiler venv ## train one model in three ways and draw their memory (6 minutes, into build/demo/)
	@$(PY) -m benchmarks.demo

test: compiler lint ## all checks, then all tests
	@OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest $(PYTEST_WORKERS)

lint: venv ## ruff, mypy and the import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports

bench: compiler venv ## measured peaks and step times beside eager and torch.compile (into build/benchmarks/)
	@$(PY) -m benchmarks.first

clean: ## remove what was built or cached, but not .venv
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

define NO_COMPILER
No working C++ compiler was found (tried: $(or $(CXX),g++ clang++ c++)), and Inductor needs one: install it with \
'apt-get install g++' (Debian, Ubuntu), 'dnf install gcc-c++' (Fedora) or 'xcode-select --install' (macOS), or set \
CXX to yours.
endef

compiler:
	@$(or $(CXX),false) --version >/dev/null 2>&1 || { echo "$(NO_COMPILER)" >&2; exit 1; }

venv: .venv/installed
ifneq ($(VENV),.venv)
	@mkdir -p $(dir $(VENV)) && ln -sfn "$(CURDIR)/.venv" $(VENV)
endif

# Must parse under every Python, the oldest too.
define CHECK_PYTHON
import os, sys
if sys.version_info < (3, 10):
    sys.exit("remat needs Python 3.10 or newer, and this is %s: name a newer one, as in 'make PYTHON=python3.12'."
             % sys.version.split()[0])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("This Python has no venv module: install it with 'apt-get install python3-venv' (Debian, Ubuntu).")
import sysconfig
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("Inductor needs this Python's C headers: install them with 'apt-get install python3-dev' (Debian, Ubuntu)"
             " or 'dnf install python3-devel' (Fedora).")
endef
export CHECK_PYTHON

# `.venv/installing` lies there while pip works. Where it is found, an installation was interrupted and .venv may hold
# half a package, so it is made anew.
.venv/installed: pyproject.toml
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
		echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one, as in 'make PYTHON=...'." >&2; exit 1; }
	@"$(PYTHON)" -c "$$CHECK_PYTHON"
	@echo "Installing PyTorch and remat into .venv; the first time this takes some minutes..."
	@if [ -e .venv/installing ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
		"$(PYTHON)" -m venv --clear .venv; fi
	@rm -f $@ && touch .venv/installing
	@.venv/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0 --editable '.[dev,demo]'
	@mv .venv/installing $@ && touch $@
