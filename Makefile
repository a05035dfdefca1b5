# Every target works on its own on a fresh checkout: it makes the environment that it needs.
#   make test PYTHON=python3.12 PYTEST_ARGS="-k rope"

PYTHON ?= python3
PYTEST_ARGS ?=
# Two test workers: each of them compiles on more than one thread. What a worker compiles for one test it has for its
# next, so tests of a file go to one worker until the other has nothing left (worksteal).
WORKERS ?= 2
TESTS ?= tests
SUITES ?= core layer long bf16

VENV := .venv
NEWEST := .venv-newest
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
# Two installs must not run into one environment at once.
.NOTPARALLEL:
.PHONY: help demo test test-quick test-newest newest-python bench reports lint format wheel-check clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo-installed ## Run the demo
	$(BIN)/foveal demo

test: $(VENV)/.test-installed ## Run the tests, parity with transformers included
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) $(TESTS)

test-quick: $(VENV)/.test-installed ## Run the quick tests, two minutes
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "quick and not slow" --hypothesis-profile=quick $(PYTEST_ARGS) $(TESTS)

test-newest: $(NEWEST)/.test-installed ## Run the tests on the newest Python and JAX to be had, without torch
	$(NEWEST)/bin/pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) $(TESTS)

bench: $(VENV)/.test-installed ## Compare with dense and transformers, minutes
	set -e; for suite in $(SUITES); do \
		$(BIN)/python -m benchmarks.attention --suite $$suite --output benchmarks/results; \
	done

reports: $(NEWEST)/.test-installed ## Compile for TPUs at the sizes of use, half an hour
	$(NEWEST)/bin/python -m benchmarks.compiled
	$(NEWEST)/bin/pytest --reports $(PYTEST_ARGS) tests

lint: $(VENV)/.lint-installed ## Check format, style, types, layers and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

format: $(VENV)/.lint-installed ## Format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove environments, caches and build output
	rm -rf .venv .venv-newest build dist demo .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# --- Environments -----------------------------------------------------------------------------------------------------
# A stamp file stands for a finished install: it is redone when pyproject.toml changes and skipped otherwise.

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo-installed: pyproject.toml | $(VENV)/.created
	$(BIN)/python $(PIP_INSTALL) -e '.[checkpoint,demo]'
	touch $@

$(VENV)/.test-installed: pyproject.toml | $(VENV)/.created
	$(BIN)/python $(PIP_INSTALL) -e '.[test,test-torch,demo]'
	touch $@

# With the test packages: the type checker must see what the tests import.
$(VENV)/.lint-installed: $(VENV)/.test-installed
	$(BIN)/python $(PIP_INSTALL) -e '.[lint]'
	touch $@

# Tries each candidate: a pyenv shim of an unselected version exists but does not run.
FIND_NEWEST = for minor in 14 13 12; do \
	for candidate in "$$(command -v python3.$$minor)" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.$$minor.*/bin/python3.$$minor; do \
		if [ -x "$$candidate" ] && "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then \
			echo "$$candidate"; exit 0; \
		fi; \
	done; \
done

newest-python: ## Print the Python that test-newest uses; nothing if there is none
	@$(FIND_NEWEST)

$(NEWEST)/.created:
	@python="$$($(FIND_NEWEST))"; \
	if [ -z "$$python" ]; then echo "test-newest needs Python 3.12 or newer; none was found" >&2; exit 1; fi; \
	set -x; "$$python" -m venv $(NEWEST)
	touch $@

$(NEWEST)/.test-installed: pyproject.toml | $(NEWEST)/.created
	$(NEWEST)/bin/python $(PIP_INSTALL) --upgrade --upgrade-strategy eager -e '.[test,demo]'
	touch $@

# --- Wheel ------------------------------------------------------------------------------------------------------------
# The limits are on what `import foveal` costs a user who installed nothing but the wheel. flax itself imports rich, so
# what the dependencies bring along is not held against foveal.

define WHEEL_CHECK
import importlib.resources, subprocess, sys, time

HEAVY = {"hypothesis", "matplotlib", "rich", "safetensors", "tokamax", "torch", "transformers"}
PROBE = """
import sys, time
tried = set()
class Watch:
    def find_spec(self, name, path=None, target=None):
        tried.add(name)
sys.meta_path.insert(0, Watch())
start = time.perf_counter()
import MODULES
print(time.perf_counter() - start, *tried)
"""

def probe(modules):
    seconds, *tried = subprocess.check_output([sys.executable, "-c", PROBE.replace("MODULES", modules)], text=True).split()
    return float(seconds), set(tried)

brought = HEAVY & (probe("foveal")[1] - probe("jax, jaxtyping, flax.nnx")[1])
seconds = min(probe("foveal")[0] for _ in range(3))
print(f"import foveal: {seconds:.2f} s")
if brought:
    sys.exit(f"import foveal also tries to import {sorted(brought)}")
if seconds >= 2:
    sys.exit("import foveal takes 2 s or more")
if not importlib.resources.files("foveal").joinpath("py.typed").is_file():
    sys.exit("the wheel lacks py.typed")
endef
export WHEEL_CHECK

wheel-check: $(VENV)/.created ## Build a wheel and check what `import foveal` costs in an empty environment
	@set -eu; scratch="$$(mktemp -d)"; trap 'rm -rf "$$scratch"' EXIT; set -x; \
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$$scratch" .; \
	$(PYTHON) -m venv "$$scratch/venv"; \
	"$$scratch/venv/bin/python" $(PIP_INSTALL) "$$scratch"/foveal-*.whl; \
	{ set +x; } 2>/dev/null; cd "$$scratch"; venv/bin/python -c "$$WHEEL_CHECK"; venv/bin/foveal --help >/dev/null
