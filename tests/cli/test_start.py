"""What a command demands of the libraries: few imports, no compiler, no needless collection."""

import gc
import os
import platform
import subprocess
import sys

import pytest
import torch

import fedloom
from fedloom._system import MALLOC_VARIABLES, import_compiled, peak_memory
from fedloom.nn import optimizers

KINDS = {
    "adam": (optimizers.Adam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.01, "fused": True}),
    "sgd": (optimizers.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9}),
}


def fresh(script: str, **variables: str) -> list[str]:
    """Returns what a script prints in a new process with default settings of the allocator."""
    inherited = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=inherited | variables,
    )
    return done.stdout.split()


def steps(kind, settings, again=None):
    """Returns the parameters after five steps. The state may move to another optimiser midway."""
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    optimizer = kind([x], **settings)
    for k in range(5):
        if k == 3 and again is not None:
            saved, optimizer = optimizer.state_dict(), again([x], **settings)
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        ((x - 1) ** 4).sum().backward()
        optimizer.step()
    return x.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_optimisers_match_pytorch_and_exchange_states(kind):
    own, theirs, settings = KINDS[kind]
    expected = steps(theirs, settings)
    assert torch.equal(steps(own, settings), expected)
    assert torch.equal(steps(own, settings, again=theirs), expected)
    assert torch.equal(steps(theirs, settings, again=own), expected)


@pytest.mark.slow
def test_a_run_imports_no_compiler():
    script = """
import sys, fedloom
for engine in ("loop", "stacked"):
    for optimizer in ("adam", "sgd"):
        clients = fedloom.synthetic_clients(2)
        fedloom.run("fedavg", clients, rounds=1, engine=engine, optimizer=optimizer)
print(*(name in sys.modules for name in ("torch", "torch._dynamo", "torch_geometric")))
"""
    assert fresh(script) == ["True", "False", "False"]


# Packages that take long to import. A command imports those that it uses.
SLOW = {
    "cryptography",
    "matplotlib",
    "networkx",
    "numpy",
    "optuna",
    "pandas",
    "pyarrow",
    "scipy",
    "scipy.stats",
    "sklearn",
    "sknetwork",
    "sympy",
    "torch",
    "torch._dynamo",
    "torch_geometric",
}
PROGRAM = """
import sys
from fedloom.cli import main
try:
    main()
finally:
    with open("imported", "w") as file:
        file.write(" ".join(sys.modules))
"""
DENSE = ["--dataset", "synthetic:nodes=150,classes=3,features=8", "--clients", "3", "--rounds", "2"]


def imported(*arguments, cwd):
    """Returns the slow packages that a command imports in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return SLOW & set((cwd / "imported").read_text().split())


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["methods"]])
def test_commands_that_compute_nothing_import_nothing_slow(arguments, tmp_path):
    assert imported(*arguments, cwd=tmp_path) == set()


@pytest.mark.slow
def test_other_commands_import_what_they_use(tmp_path):
    random = [*DENSE, "--partition", "random"]
    tensors, sparse = {"numpy", "torch"}, {"numpy", "torch", "scipy"}
    assert imported("run", *random, "--out", "x", cwd=tmp_path) == sparse
    assert imported("run", *random, "--engine", "loop", cwd=tmp_path) == sparse
    secure = imported("run", *random, "--secure", cwd=tmp_path)
    assert secure == sparse | {"cryptography"}
    assert imported("run", *DENSE, "--partition", "louvain", cwd=tmp_path) <= sparse | {"sknetwork"}
    compare = ("compare", *random, "--seeds", "1")
    assert imported(*compare, cwd=tmp_path) == sparse
    assert imported(*compare, cwd=tmp_path) == tensors  # all runs are cached
    assert imported("methods", "fedavg", cwd=tmp_path) == tensors
    assert imported("show", "x", cwd=tmp_path) == tensors
    assert imported("predict", "x", "--out", "predicted.csv", cwd=tmp_path) <= sparse
    assert imported("report", "x", cwd=tmp_path) == {"numpy"}


@pytest.mark.parametrize("name", ["sknetwork.clustering.no_such", "no_such.module"])
def test_a_missing_compiled_module_is_an_import_error(name):
    with pytest.raises(ImportError, match=f"no compiled module '{name}'"):
        import_compiled(name)


ALONE = """
import sys
from fedloom._system import import_compiled

core = import_compiled("sknetwork.clustering.louvain_core")
print("sknetwork" in sys.modules)
from sknetwork.clustering import louvain
print(louvain.optimize_core is core.optimize_core)
print(import_compiled("sknetwork.clustering.louvain_core") is core)
"""


def test_a_compiled_module_is_imported_without_its_package():
    assert fresh(ALONE) == ["False", "True", "True"]


HELD = """
import torch
from fedloom._system import retained_memory

def pages_after_a_step():
    blocks = [torch.ones(2**20 * k) for k in (1, 2, 3, 4, 5)]  # of 4 to 20 MB, 15,360 pages
    del blocks
    return pages()

def pages():
    return int(open("/proc/self/statm").read().split()[1])

torch.set_num_threads(1)
before = pages_after_a_step()
with retained_memory():
    inside = pages_after_a_step()
print(before, inside, pages())
"""
GLIBC = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc",
    reason="the C library's allocator is not glibc's",
)


@GLIBC
@pytest.mark.slow
def test_freed_memory_is_kept_during_a_run_and_returned_after_it():
    before, inside, after = map(int, fresh(HELD))
    assert inside - before > 10_000
    assert inside - after > 10_000


@GLIBC
@pytest.mark.slow
def test_settings_of_the_allocator_are_respected():
    before, inside, _ = map(int, fresh(HELD, MALLOC_MMAP_THRESHOLD_="65536"))
    assert inside - before < 1000


def test_after_a_run_the_garbage_collector_is_unfrozen(node_federation):
    frozen = []
    fedloom.run(
        "fedavg",
        node_federation,
        rounds=2,
        callbacks=lambda entry: frozen.append(gc.get_freeze_count()),
    )
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="other systems do not mix the peaks of parent and child",
)
@pytest.mark.slow
def test_peak_memory_is_that_of_the_process_itself():
    block = torch.ones(2**26)  # 256 MB, which a child must not inherit
    assert peak_memory() > block.nbytes
    (child,) = map(int, fresh("import fedloom._system as a; print(a.peak_memory())"))
    assert child < block.nbytes
