"""The digest in a cell's name changes with the code that the run imports, and with no other."""

import subprocess
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.experiments import source_digest as digests
from fedloom.experiments.grid import cell
from fedloom.experiments.source_digest import ROOT, code_behind, imported_files

STACKED = {"method": {"name": "fedavg"}, "run": {"engine": "stacked"}}


@pytest.fixture
def edit(monkeypatch):
    """Returns a function that makes the digest read a file as if a line were added to it."""

    def change(name):
        target = ROOT / name
        assert target.is_file()

        def read(path):
            return path.read_bytes() + (b"\nEDITED = True\n" if path == target else b"")

        monkeypatch.setattr(digests, "_read", read)

    return change


@pytest.mark.parametrize(
    "name",
    [
        "data/matmul.py",
        "data/partition.py",
        "engines/stacked/parameters.py",
        "engines/stacked/graphs.py",
        "engines/stacked/lockstep.py",
        "engines/stacked/operations.py",
        "nn/optimizers.py",
        "core/aggregation.py",
        "experiments/run.py",
        "methods/_shared/local_training.py",
    ],
)
def test_editing_a_module_that_the_run_imports_renames_the_cell(name, edit, tmp_path):
    before = cell(STACKED, tmp_path).name
    edit(name)
    assert cell(STACKED, tmp_path).name != before


@pytest.mark.parametrize(
    "name",
    [
        "experiments/report/tables.py",
        "experiments/report/figures.py",
        "experiments/report/comparison.py",
        "experiments/trackers.py",
        "experiments/executor.py",
        "cli.py",
        "commands.py",
        "methods/moon.py",
        "engines/wire.py",
        "deploy/party.py",
    ],
)
def test_editing_any_other_module_does_not(name, edit, tmp_path):
    before = cell(STACKED, tmp_path).name
    edit(name)
    assert cell(STACKED, tmp_path).name == before


@pytest.mark.slow
def test_the_files_are_those_that_python_imports():
    """All modules of fedloom that a run imports are covered, except those that are excluded."""
    script = (
        "import sys\n"
        "from fedloom.experiments.recipe import make_recipe\n"
        "make_recipe({'data': {'dataset': 'synthetic:nodes=40,classes=2'},"
        " 'partition': {'name': 'random', 'clients': 2}, 'model': {'name': 'gcn-2x4'},"
        " 'method': {'name': 'fedproto', 'rounds': 1}, 'run': {'engine': 'stacked'}}).execute()\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'fedloom'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    missing = {Path(path) for path in done.stdout.split()} - set(
        imported_files("fedproto", None, "stacked")
    )
    assert {path.name for path in missing} <= {
        "trackers.py",
        "memory_estimate.py",
        "engine_choice.py",
        "display.py",
    }


def test_the_public_modules_are_covered():
    """A user's file may use `fedloom.load` and the like, which the parser cannot follow."""
    covered = set(imported_files("fedavg"))
    public = {path for path in map(digests._file_of, _public_modules()) if path is not None}
    assert public <= covered


def _public_modules():
    return {f"fedloom.{module}" for module in fedloom._MODULE_OF.values()}


def test_an_engine_and_a_base_are_part_of_the_digest():
    found = {
        code_behind("fedavg"),
        code_behind("fedavg", engine="wire"),
        code_behind("fedgh", "fedavg"),
        code_behind("fedgh", "fedtad"),
    }
    assert len(found) == 4
    plugged = {str(path.relative_to(ROOT)) for path in imported_files("fedgh", "fedtad")}
    assert {"methods/fedgh/vgae.py", "methods/fedtad.py"} <= plugged


def test_the_loop_engine_does_not_depend_on_the_stacked_one():
    assert not [path for path in imported_files("fedavg") if "stacked" in path.parts]


MINE = '''"""Mine: a method of its own.

What travels: as in FedAvg.
"""
import helper
from fedloom.api import FedAvg


class Mine(FedAvg):
    """Mine."""

    def objective(self, *arguments):
        from fedloom.privacy import bfv, leakage as _leakage

        return super().objective(*arguments)
'''


def test_a_users_file_counts_with_what_it_imports(tmp_path, monkeypatch, edit):
    """Imports inside of functions count, and so do files next to the method's file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    mine, helper = tmp_path / "mine.py", tmp_path / "helper.py"
    mine.write_text(MINE)
    helper.write_text("VALUE = 1\n")
    first = code_behind(str(mine))
    assert {mine, helper, ROOT / "privacy/bfv.py", ROOT / "privacy/leakage.py"} <= set(
        imported_files(str(mine))
    )
    helper.write_text("VALUE = 2\n")
    second = code_behind(str(mine))
    mine.write_text(MINE + "\n    epochs: int = 3\n")
    third = code_behind(str(mine))
    edit("privacy/leakage.py")
    assert len({first, second, third, code_behind(str(mine))}) == 4


def test_the_digest_does_not_depend_on_where_a_users_file_is(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
        (place / "mine.py").write_text(MINE.replace("import helper\n", ""))
    assert len({code_behind(str(place / "mine.py")) for place in places}) == 1


@pytest.mark.parametrize(
    ("source", "package", "names"),
    [
        ("import a.b as c", "", ["a.b"]),
        ("from a import b, c as d", "", ["a", "a.b", "a.c"]),
        ("from . import x", "fedloom.data", ["fedloom.data", "fedloom.data.x"]),
        ("from ..nn import y", "fedloom.data", ["fedloom.nn", "fedloom.nn.y"]),
        ("from .x import y", "fedloom.data", ["fedloom.data.x", "fedloom.data.x.y"]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", "", ["b"]),
        ("def f():\n    import a", "", ["a"]),
    ],
)
def test_imports_are_read_from_source(source, package, names):
    assert list(digests._names_in(source.encode(), package)) == names


def test_an_own_model_counts(tmp_path) -> None:
    net = tmp_path / "net.py"
    net.write_text("a = 1\n")
    first = code_behind("fedavg", model=f"gcn,{net}:Net")
    assert first != code_behind("fedavg", model="gcn")
    net.write_text("a = 2\n")
    assert first != code_behind("fedavg", model=f"gcn,{net}:Net")
