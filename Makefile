# Each target sets up all it needs in .venv by itself (Python 3.10 or newer, pip, make); a second call has nothing to set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# What an editable install is made from; the Python sources themselves are read in place.
INSTALLED_FROM := pyproject.toml constraints.txt hatch_build.py $(wildcard src/gradsan/record/*.[ch] src/gradsan/record/native/*.h src/gradsan_start/*.pth)

DEVICE ?= cuda

.PHONY: help demo test test-long test-native test-devices test-gpu lint types bench docs build clean

help:
	@echo "make demo    run a failing GAN training under gradsan, see the report, and what mends it"
	@echo "make test    run the tests"
	@echo "make test-long  the long ones, too"
	@echo "make test-native  the C core under sanitizers (Linux, gcc)"
	@echo "make test-devices  the tests on two simulated accelerators (Linux, a C++ compiler, cmake; else they are skipped)"
	@echo "make test-gpu  the same on the GPU of this machine (DEVICE=cuda, xpu, mps)"
	@echo "make lint    ruff check and ruff format --check"
	@echo "make types   strict mypy"
	@echo "make bench   what gradsan costs, on this machine"
	@echo "make docs    the documentation as a site, into site/"
	@echo "make build   source distribution and wheel into dist/"
	@echo "make clean   remove .venv and everything built"

# The demo's program is broken on purpose: it has to fail (exit status 1), gradsan has to say why, and to find a fix.
demo: $(STAMPS)/test
	@echo "==> gradsan run examples/gan/train.py    (this program fails: that is what the demo shows)"
	@$(BIN)/gradsan run --json $(VENV)/demo.json examples/gan/train.py; status=$$?; \
	if [ $$status -ne 1 ]; then echo "demo: the program was to fail with exit status 1; it ended with $$status" >&2; exit 1; fi; \
	$(BIN)/python -c 'import json; found = json.load(open("$(VENV)/demo.json"))["diagnoses"]; assert found, "no diagnosis"'
	@echo "==> the program failed, as it was to, and the report above says why"
	@echo "==> gradsan fix --steps 4 examples/gan/train.py    (candidates are tried; no file is changed)"
	@$(BIN)/gradsan fix --steps 4 --json $(VENV)/demo.json examples/gan/train.py
	@$(BIN)/python -c 'import json; fixes = json.load(open("$(VENV)/demo.json"))["diagnoses"][0]["fixes"]; assert fixes[0]["verification"]["status"] == "passed", fixes[0]'
	@echo "==> each diff above was run; gradsan fix --apply writes the first; examples/gan/fixed.py is the working program"

# Each worker keeps to its part of the files, so that what a file prepares is prepared once, until another is done.
# One more worker than cores: a worker often waits for a process or a timeout.
test: $(STAMPS)/test
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-long: $(STAMPS)/test
	$(BIN)/python -m pytest -n 3 --dist worksteal --long --timeout 1200 -o faulthandler_timeout=1230

test-native: $(STAMPS)/test
	$(BIN)/python tools/native_checks.py

# Compiled once, before the two workers ask for it.
test-devices: $(STAMPS)/test
	$(BIN)/python tests/devices/simulated.py || true
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/devices --device simulated -rs
	$(BIN)/python tools/openreg.py || true
	$(BIN)/python -m pytest tests/devices --device openreg -rs

test-gpu: $(STAMPS)/test
	$(BIN)/python -m pytest tests/devices --device $(DEVICE) -rs

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/test $(STAMPS)/lint
	$(BIN)/mypy

bench: $(STAMPS)/test
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/fix.py

# The theme warns of the next mkdocs at every build; constraints.txt keeps to this one.
docs: $(STAMPS)/test $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -rs tests/test_site_search.py

build: $(STAMPS)/build
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist site docs/reference .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f src/gradsan/record/_native*.so
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Debian's python3 has venv without ensurepip; pip can be put into the new environment from outside.
# pip older than 25.1 cannot read dependency groups.
$(STAMPS)/venv:
	@echo "==> creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gradsan needs Python 3.10 or newer; $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; }
	@$(PIP) install --upgrade 'pip>=25.1'
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/test: $(STAMPS)/venv $(INSTALLED_FROM)
	@echo "==> installing gradsan, torch and what the tests need (the first time takes a minute or two)"
	@$(PIP) install --constraint constraints.txt --editable . --group test
	@touch $@

$(STAMPS)/lint: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "==> installing ruff and mypy"
	@$(PIP) install --constraint constraints.txt --group lint
	@touch $@

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml constraints.txt
	@$(PIP) install --constraint constraints.txt --group docs
	@touch $@

$(STAMPS)/build: $(STAMPS)/venv pyproject.toml
	@$(PIP) install --group build
	@touch $@
