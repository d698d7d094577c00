# `make demo` and `make test` do all set-up themselves; a second run reuses .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
VLLM ?= 0.32.0
READY := $(VENV)/.ready-$(VLLM)
MODEL := .cache/SmolLM2-135M-Instruct
# See the file there: vLLM's busy waits can stop everything else on a machine of few cores.
export PYTHONPATH := $(CURDIR)/tools/steady

.PHONY: setup demo test test-compat parity soak lint docs lock dist bench bench-2048 model clean

setup: $(READY)

$(READY): pyproject.toml tools/setup_venv.sh
	PYTHON=$(PYTHON) VENV=$(VENV) VLLM=$(VLLM) bash tools/setup_venv.sh
	touch $@

model: setup
	$(BIN)/python examples/prepare_model.py $(MODEL)

demo: model
	$(BIN)/python examples/demo.py

test: setup
	bash tools/setup_browser.sh
	$(BIN)/python -m pytest

# Another version of the host: make test-compat VLLM=0.31.0
test-compat:
	$(MAKE) test VENV=.venv-$(VLLM) VLLM=$(VLLM)

parity: setup
	PARITY_TABLE=docs/parity.md $(BIN)/python -m pytest tests/parity -m "parity or not parity"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHON=$(CURDIR)/$(BIN)/python bash tools/typecheck.sh

# The documents as a site, in .cache/docs/site. They are copied first: links lead to each other and to files as in the repository.
docs: setup
	rm -rf .cache/docs && mkdir -p .cache/docs/source
	cp -r --parents *.md LICENSE docs examples tools .cache/docs/source
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What a fresh set-up installs today; `PIP_CONSTRAINT=requirements/test.lock make setup` installs the same again.
lock:
	rm -rf .venv-lock
	$(MAKE) setup VENV=.venv-lock
	.venv-lock/bin/python -m pip --disable-pip-version-check freeze --all --exclude-editable --exclude vllm --exclude pip \
		| sed 's/+cpu$$//' >requirements/test.lock

# What a release uploads: a source archive and the wheel made from it, checked.
dist:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip --disable-pip-version-check --quiet install build twine pytest "setuptools>=77,<84"
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/python -m pytest -c /dev/null --rootdir . --noconftest tests/packaging/test_wheel.py

soak: setup
	SOAK_SECONDS=600 $(BIN)/python -m pytest tests/soak -s

bench: model
	$(BIN)/python benchmarks/cpu_serving.py --model $(MODEL) --json .cache/cpu_serving.json
	$(BIN)/python benchmarks/gaps.py --model $(MODEL) --json .cache/gaps.json

# The same loads on a random model of hidden 2048: a layer's adapters are a smaller part of it.
bench-2048: setup
	$(BIN)/python benchmarks/random_model.py .cache/random-2048
	$(BIN)/python benchmarks/cpu_serving.py --model .cache/random-2048 --json .cache/cpu_serving-2048.json

clean:
	rm -rf $(VENV) .venv-* .cache build dist *.egg-info
