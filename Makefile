# fedloom: everything a developer or a user types. `make help` lists it.
PYTHON ?= python3
BIN := .venv/bin
# The demo finds real data like any other command; where there are none, it uses the Cora that a package on PyPI carries.
SHELL := /bin/bash

.PHONY: help setup demo test check format bench reproduce results clean

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20

setup: .venv/ready  ## the environment, in .venv

# torch first and exactly: any other request would pull gigabytes of GPU packages.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot,tables,demo,he,flower,dev]'
	@touch $@

demo: setup  ## a federation on Cora: FedAvg, with local and central training beside it
	$(BIN)/fedloom run recipes/cora-louvain10-fedavg.toml --beside local,central

test: setup check  ## lint, types and tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2

check: setup  ## lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## put the code in its usual form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## speed, memory and growth against a plain PyG loop: docs/benchmarks.md; secure sums, 15,000 dropout patterns; FedStruct's exchange; 2,000 rounds without growing; deployments over Flower; networks that fail, a full disk
	OMP_NUM_THREADS=1 $(BIN)/python bench/speed.py --write docs/benchmarks.md
	$(BIN)/python bench/secure_sum.py
	$(BIN)/python bench/hops.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/soak.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/flower.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/faults.py
	FEDLOOM_SLOW=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/deploy/test_apps.py
	FEDLOOM_SECURE_CASES=2500 OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 tests/privacy/test_secure_sum.py

reproduce: setup  ## run the short recipes over their seeds and compare with what they should give
	$(BIN)/python bench/reproduce.py recipes/*.toml

results: setup  ## every method on Cora, CiteSeer, PubMed, Chameleon and Photo, 3 or 5 seeds: the tables in docs/results.md (a night)
	$(BIN)/python bench/results.py docs/results.md
	$(BIN)/python bench/oneshot.py docs/results.md
	$(BIN)/python bench/fedstruct.py docs/results.md
	$(BIN)/python bench/fedpg.py docs/results.md
	$(BIN)/python bench/fedgkc.py docs/results.md

clean:  ## remove what tools leave behind (not runs, not the environment)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
