# fedloom: everything a developer or a user types. `make help` lists it.
PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash
EXTRAS := plot,tables,demo,he,flower,tune,tensorboard,mlflow,docs,dev
# Two cores are enough for three test processes: tests of deployments wait more than they compute.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q

.PHONY: help setup demo test test-slow check browser debootstrap format refactoring bench reproduce reproduce-all results docs pictures clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 24

setup: .venv/ready  ## the environment, in .venv

# torch first and exactly: any other request would pull gigabytes of GPU packages.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
# ByzFL's rules are compared with ours. Its training framework needs torchvision; the rules do not.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt byzfl==0.0.11
	@touch $@

demo: setup  ## FedGram on Cora with 10 clients; FedAvg, local and central training as baselines
	$(BIN)/fedloom run examples/cora-louvain-10-fedgram --baselines fedavg,local,central

test: setup check  ## lint, types, import direction and the quick tests
	$(PYTEST) -n 2 --dist worksteal -m "not slow"

test-slow: setup  ## the slow tests: fresh installs of the wheel, deployments, kills, browsers, Ray
	$(PYTEST) -n 3 --dist worksteal -m slow

check: setup  ## lint, types and import direction only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

browser:  ## Debian's Chromium for the tests of the pages
	@command -v chromium || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } \
	  || { echo "install chromium, e.g.: sudo apt-get install chromium"; exit 1; }

debootstrap:  ## debootstrap, for the test of the wheel in Debian 13 (the oldest PyTorch, Python 3.13)
	@command -v debootstrap || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap; } \
	  || { echo "install debootstrap, e.g.: sudo apt-get install debootstrap"; exit 1; }

format: setup  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

refactoring: setup  ## compare seeded results with those of another commit: make refactoring BASE=<commit>
	@test -n "$(BASE)" || { echo "which commit? make refactoring BASE=<commit>"; exit 2; }
	rm -rf build/base && mkdir -p build && git worktree prune && git worktree add --force --detach build/base $(BASE)
	cp bench/refactoring.py build/refactoring.py
	cd build/base && PYTHONPATH=src ../../$(BIN)/python ../refactoring.py record ../before.json
	$(BIN)/python bench/refactoring.py record build/after.json
	git worktree remove --force build/base
	$(BIN)/python bench/refactoring.py compare build/before.json build/after.json

bench: setup  ## speed and memory against a plain PyG loop (docs/benchmarks.md), secure sums, deployments, faults
	OMP_NUM_THREADS=1 $(BIN)/python bench/speed.py --write docs/benchmarks.md
	$(BIN)/python bench/secure_sum.py
	$(BIN)/python bench/hops.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/soak.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/flower.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/faults.py
	FEDLOOM_SLOW=1 $(PYTEST) tests/deploy/test_apps.py
	FEDLOOM_SECURE_CASES=2500 $(PYTEST) -n 2 tests/privacy/test_secure_sum.py

reproduce: setup  ## the papers' numbers that take 25 minutes together, with Local beside each (docs/results.md)
	$(BIN)/python bench/reproduce.py --within 25

reproduce-all: setup  ## all of the papers' numbers (a night); finished runs are cached
	$(BIN)/python bench/reproduce.py

results: setup  ## the tables in docs/results.md and docs/fedgram.md (some nights)
	$(BIN)/python bench/results.py docs/results.md
	$(BIN)/python bench/oneshot.py docs/results.md
	$(BIN)/python bench/fedstruct.py docs/results.md
	$(BIN)/python bench/fedpg.py docs/results.md
	$(BIN)/python bench/fedgkc.py docs/results.md
	$(BIN)/python bench/fedgram.py docs/fedgram.md
	$(BIN)/python bench/gram_leakage.py docs/fedgram.md
	$(BIN)/python bench/gram_privacy.py docs/fedgram.md
	$(BIN)/python bench/gram_time.py docs/fedgram.md

docs: setup  ## the documentation, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet: it would hide warnings from --strict

pictures: setup  ## the pictures of the report in docs/ (3 minutes on two quiet cores; needs Chromium)
	$(BIN)/python docs/pictures.py

clean:  ## remove what tools leave behind (not runs, not the environment)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
