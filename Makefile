# fedloom: everything a developer or a user types. `make help` lists it.
PYTHON ?= python3
BIN := .venv/bin
# The demo finds real data like any other command; where there are none, it uses the Cora that a package on PyPI carries.
SHELL := /bin/bash

.PHONY: help setup demo test check browser format bench reproduce reproduce-all results docs pictures clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 24

setup: .venv/ready  ## the environment, in .venv

# torch first and exactly: any other request would pull gigabytes of GPU packages.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot,tables,demo,he,flower,tune,tensorboard,mlflow,docs,dev]'
	@touch $@

demo: setup  ## a federation on Cora: FedAvg, with local and central training beside it
	$(BIN)/fedloom run recipes/cora-louvain10-fedavg.toml --baselines local,central

test: setup check  ## lint, types and tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist worksteal  # three on two cores: tests of deployments wait more than they compute

check: setup  ## lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser:  ## Debian's Chromium for the tests of the pages
	@command -v chromium || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } \
	  || { echo "install chromium, e.g.: sudo apt-get install chromium"; exit 1; }

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

reproduce: setup  ## the papers' numbers that take 25 minutes together, some of each paper, Local beside them: a section of docs/results.md
	$(BIN)/python bench/reproduce.py --within 25

reproduce-all: setup  ## all of the papers' numbers (a night); started again, it goes on
	$(BIN)/python bench/reproduce.py

results: setup  ## every method on Cora, CiteSeer, PubMed, Chameleon and Photo, 3 or 5 seeds: the tables in docs/results.md (a night)
	$(BIN)/python bench/results.py docs/results.md
	$(BIN)/python bench/oneshot.py docs/results.md
	$(BIN)/python bench/fedstruct.py docs/results.md
	$(BIN)/python bench/fedpg.py docs/results.md
	$(BIN)/python bench/fedgkc.py docs/results.md

docs: setup  ## the docs site, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet: it would keep warnings from counting

pictures: setup  ## the pictures of the report in docs/: a comparison of nine methods, 3 minutes on two quiet cores; needs Chromium
	$(BIN)/python docs/pictures.py

clean:  ## remove what tools leave behind (not runs, not the environment)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
