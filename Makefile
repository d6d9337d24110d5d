# make test and make run set everything up first, in .venv, with the torch of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin

# bfloat16 kills Python on some CPUs that advertise AMX unless this is set before torch's first operation
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: setup browser run test bench soak lint format clean

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

run: setup
	$(BIN)/torchcaps quick

# the tests of the page look at it in Debian's Chromium; where it cannot be had they are skipped, or fail with CI=true
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
		sudo=$$([ "$$(id -u)" = 0 ] || echo 'sudo -n'); \
		echo "There is no Chromium, which the tests of the page need: $${sudo:+$$sudo }apt-get install chromium"; \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq --yes --no-install-recommends chromium >/dev/null; \
	} || { \
		echo 'Chromium could not be installed: the tests of the page are left out, or fail with CI=true.'; \
		[ "$$CI" != true ]; \
	}

test: setup browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

bench: setup
	$(BIN)/python -m benchmarks.bench

soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak
	OMP_NUM_THREADS=1 TORCHCAPS_LARGE=1 $(BIN)/python -m pytest -n $(JOBS) tests/recipes

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
