# `make test` and `make demo` need nothing but Python 3.11 or later with venv and pip.
# VENV says where the environment lives (CI keeps one outside the checkout).

PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && { command -v $$p; break; }; done)
VENV ?= .venv
# Pinned: a plain `torch` may resolve to a build for another accelerator, or to an untested release.
TORCH ?= torch==2.13.0
BUILD := build

BIN := $(VENV)/bin
# The environment is right for one pyproject.toml, one torch and one checkout (it is an editable
# install): the stamp's name says which, so a change of any rebuilds it, whatever the file times say.
STAMP := $(VENV)/.installed-$(shell { cat pyproject.toml setup.py; echo '$(TORCH)' '$(CURDIR)'; } | cksum | cut -d' ' -f1)
# The same with what only the docs need; an environment with everything serves as well.
DOCS_STAMP := $(or $(wildcard $(STAMP)),$(subst .installed-,.docs-,$(STAMP)))

DEMO_ARGS ?=
# What a newcomer runs: minutes. The rest, and PyTorch's databases as a whole, are in `test-all`.
FIRST_TESTS := $(addprefix tests/,benches cli dispatch docs examples invariants lazy_tensor parity replay sharding world) \
	$(wildcard tests/test_*.py)
WHOLE_DATABASES := $(addprefix tests/conformance/test_,ops.py modules.py optimizers.py error_inputs.py)
TEST_ARGS ?= -n 2 -m 'not slow' $(FIRST_TESTS)
ALL_ARGS ?= -n 2
BENCH_ARGS ?=
FUZZ_ARGS ?=
GPU_ARGS ?=

# nvFuser is built for one Python and one torch: a second environment, for its tests alone.
NVFUSER_VENV ?= .venv-nvfuser
NVFUSER_PYTHON ?= $(shell command -v python3.12)
NVFUSER_STAMP := $(NVFUSER_VENV)/.installed-$(shell { cat pyproject.toml setup.py; echo '$(CURDIR)'; } | cksum | cut -d' ' -f1)
NVFUSER_TESTS ?= $(addprefix tests/,nvfuser invariants parity)

# The core tests on each Python and torch that the package is for, in an environment each below build/.
VERSIONS ?= 3.11-2.13.0 3.12-2.13.0 3.13-2.13.0 3.11-2.10.0
VERSIONS_TESTS ?= tests/test_tiny.py $(addprefix tests/,dispatch invariants lazy_tensor parity replay)
VERSIONS_ARGS ?= -n 2 -m 'not slow'

# Other projects' suites import much that nothing here does.
THIRDPARTY_VENV ?= .venv-thirdparty
THIRDPARTY_STAMP := $(THIRDPARTY_VENV)/.installed-$(shell { cat pyproject.toml tests/thirdparty/suites.toml; \
	echo '$(TORCH)' '$(CURDIR)'; } | cksum | cut -d' ' -f1)
THIRDPARTY_ARGS ?=

.PHONY: help demo test test-all test-versions nvfuser nvfuser-environment gpu conformance models fuzz thirdparty bench docs \
	lint fmt venv clean

help:
	@echo 'make demo   run three programs eagerly, lazily and with torch.compile, in a minute and a half'
	@echo 'make test   run the tests            make bench  run the benchmarks'
	@echo 'make test-all   all of them, and PyTorch'\''s own databases run op by op (half an hour)'
	@echo 'make test-versions   the core tests on Python 3.11 to 3.13 with torch 2.13, and on 3.11 with torch 2.10'
	@echo 'make nvfuser   the core tests where nvFuser is: Python 3.12 and torch 2.10 (7 GB)'
	@echo 'make gpu    on a machine with a GPU: what runs there, what is right and how fast, on one page'
	@echo 'make conformance   compare with eager by all of PyTorch'\''s own test databases'
	@echo 'make models train models of other libraries, all of them, lazily and eagerly'
	@echo 'make fuzz   run random programs lazily and eagerly until interrupted'
	@echo 'make thirdparty   run other projects'\'' tests in lazy_mode: THIRDPARTY_ARGS="--sources DIR"'
	@echo 'make lint   ruff and mypy            make fmt    format the sources'
	@echo 'make docs   build the documentation in build/docs'
	@echo 'make clean  remove what was built'

venv: $(STAMP)

$(STAMP):
	test -x $(BIN)/python || '$(PYTHON)' -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]' '$(TORCH)'
	rm -f $(VENV)/.installed-*
	touch $@

demo: $(STAMP)
	mkdir -p $(BUILD)
	$(BIN)/python -m lazy_tensor.examples.race --out $(BUILD)/demo.png $(DEMO_ARGS)

# Two processes of two threads on two cores: threads that spin while they wait take the cores from those
# that work, and twice the time (6:39 for `make test` instead of 3:14).
test test-all test-versions nvfuser conformance models: export OMP_WAIT_POLICY ?= passive

test: $(STAMP)
	$(BIN)/pytest $(TEST_ARGS)

test-all: $(STAMP)
	$(BIN)/pytest $(ALL_ARGS) tests $(addprefix --ignore=,$(WHOLE_DATABASES))
	$(BIN)/pytest $(ALL_ARGS) --full $(WHOLE_DATABASES)
	$(BIN)/pytest $(ALL_ARGS) -m 'not slow' --by-chance 1 --ignore=tests/sharding/test_processes.py \
		$(addprefix tests/,invariants parity replay sharding world)

test-versions: $(addprefix test-version-,$(VERSIONS))

test-version-%:
	@tests/on_version.sh $(subst -, ,$*) '$(BUILD)/versions/$*' $(VERSIONS_ARGS) $(VERSIONS_TESTS)

nvfuser: $(NVFUSER_STAMP)
	$(NVFUSER_VENV)/bin/pytest $(ALL_ARGS) -m 'not slow' $(NVFUSER_TESTS)
	$(NVFUSER_VENV)/bin/python tests/device/stand_in.py $(NVFUSER_VENV)/bin/pytest $(ALL_ARGS) tests/device

nvfuser-environment: $(NVFUSER_STAMP)

# Ten minutes of a GPU, in whatever environment `PYTHON` is of, installed or not.
gpu:
	'$(PYTHON)' tests/device/gpu.py $(GPU_ARGS)

$(NVFUSER_STAMP):
	test -x $(NVFUSER_VENV)/bin/python || '$(NVFUSER_PYTHON)' -m venv $(NVFUSER_VENV)
	$(NVFUSER_VENV)/bin/python -m pip install --quiet --editable '.[dev,nvfuser]' torch==2.10.0
	rm -f $(NVFUSER_VENV)/.installed-*
	touch $@

# A quarter of an hour, and about an hour more at first for its kernels, which build/conformance keeps.
conformance: $(STAMP)
	$(BIN)/pytest tests/conformance --full $(ALL_ARGS)

# Half an hour, of which kernels for ten of the models take most.
models: $(STAMP)
	$(BIN)/pytest tests/models --full $(ALL_ARGS)

fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/run.py $(FUZZ_ARGS)

thirdparty: $(THIRDPARTY_STAMP)
	$(THIRDPARTY_VENV)/bin/python tests/thirdparty/run.py $(THIRDPARTY_ARGS)

$(THIRDPARTY_STAMP):
	test -x $(THIRDPARTY_VENV)/bin/python || '$(PYTHON)' -m venv $(THIRDPARTY_VENV)
	$(THIRDPARTY_VENV)/bin/python -m pip install --quiet '$(TORCH)'
	$(THIRDPARTY_VENV)/bin/python -m pip install --quiet --editable '.[test]' '$(TORCH)'
	$(THIRDPARTY_VENV)/bin/python tests/thirdparty/run.py --install
	rm -f $(THIRDPARTY_VENV)/.installed-*
	touch $@

bench: $(STAMP)
	$(BIN)/pytest benches $(BENCH_ARGS)

docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q docs $(BUILD)/docs

$(VENV)/.docs-%:
	test -x $(BIN)/python || '$(PYTHON)' -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[docs]' '$(TORCH)'
	rm -f $(VENV)/.docs-*
	touch $@

lint: $(STAMP) typing-tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(BUILD)/typing && MYPYPATH=benches:../../tests/fuzz:../../tests/device '$(abspath $(BIN))/mypy' --config-file ../../pyproject.toml \
		-p lazy_tensor -p tests $(patsubst benches/%.py,-m %,$(wildcard benches/*.py))

# mypy follows no `__path__` that is extended when a package is imported: it is shown the tree as it installs.
.PHONY: typing-tree
typing-tree:
	rm -rf $(BUILD)/typing
	mkdir -p $(BUILD)/typing
	cp -Rsf '$(CURDIR)/lazy_tensor' $(BUILD)/typing/
	cp -Rsf $(patsubst %,'$(CURDIR)/%',dispatch examples kernels sharding) $(BUILD)/typing/lazy_tensor/
	ln -s ../../tests ../../benches $(BUILD)/typing/

fmt: $(STAMP)
	$(BIN)/python docs/packages.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(BUILD) *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
