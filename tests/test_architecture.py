"""The tree: packages, the direction of imports, and words that are not used any more."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedloom"
# Words of the first version that had several meanings, or one that only its authors knew.
REPLACED = (
    r"crews?", r"Office", r"Mailbox", r"Postbox", r"[Ii]n[_ ]step", r"carry_out", r"holdings?",
    r"exhibits?", r"Attendance", r"outlives", r"AtOnce", r"families", r"--beside", r"asked_again",
)  # fmt: skip


def packages():
    """The packages under src/fedloom."""
    return sorted(path.parent for path in SOURCE.glob("*/__init__.py"))


def test_there_are_at_most_eight_packages_and_few_modules_beside_them():
    assert len(packages()) <= 8
    assert len(list(SOURCE.glob("*.py"))) <= 8


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.name)
def test_each_package_says_what_it_is_in_the_words_of_the_design(package):
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    first = doc.partition("\n")[0]
    assert first.endswith(".")
    assert first.partition(": ")[2] in (ROOT / "docs" / "design.md").read_text()


def lint(folder):
    """Runs import-linter on a copy of the source. Returns its exit code and output."""
    program = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    environment = {"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("", ""),
        ("data/seeds.py", "import fedloom.nn.losses"),
        ("core/ledger.py", "import fedloom.experiments.history"),
        ("methods/fedavg.py", "import fedloom.engines.loop"),
        ("engines/loop.py", "import fedloom.engines.stacked.lockstep"),
        ("experiments/report/write.py", "import torch"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(module, line, tmp_path):
    shutil.copytree(SOURCE, tmp_path / "src" / "fedloom")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if module:
        path = tmp_path / "src" / "fedloom" / module
        path.write_text(f"{path.read_text()}\n{line}\n")
    code, output = lint(tmp_path)
    assert code == (1 if module else 0), output


def test_replaced_words_are_gone():
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.js", "*.html", "*.toml", "Makefile"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    pattern = re.compile(rf"(?<![\w-])({'|'.join(REPLACED)})(?![\w-])")
    found = [
        f"{name}:{number}: {match.group()}"
        for name in listed
        if name not in ("CHANGELOG.md", "tests/test_architecture.py") and (ROOT / name).exists()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, f"{len(found)} places, such as {found[:20]}"


def test_no_machine_path_no_pickle_no_swallowed_exception():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"(?<![\w.])/(home|root|opt|work)/[a-z]", text), path
        assert not re.search(r"pickle\.loads?\(|except( Exception)?:\s*pass", text), path
