"""Runs what the documentation shows: the examples, and every page of the README and of docs/.

A page runs from top to bottom in an empty folder. Blocks of Python share their names. A block that
begins with the name of a file (`# grid.toml`) is written to that file. Every `fedloom` line runs,
with a small graph and one round.
"""

import json
import os
import re
import runpy
import shlex
import sys
import tomllib
from itertools import groupby
from pathlib import Path

import pytest
import typer
from tests.documents import EXAMPLES, ROOT, blocks, prose, typed

import fedloom
from fedloom.cli import app, main
from fedloom.data.datasets import catalogue, find
from fedloom.experiments.run import run

needs_cora = pytest.mark.skipif(
    find("cora").kind == "download",
    reason="no Cora: not under FEDLOOM_DATA, not beside the project, no graphdatascience package",
)
# Lines that do not run here: a part of a line, or a page, and why.
SKIPPED = {
    "docs/deploy.md": "tests/deploy runs the commands of this page",
    "--engine flower": "a process for every client takes a while to start: tests/deploy runs it",
    "their-recipe.toml": "it stands for a recipe of other people: tests/experiments/test_trust.py",
    "fedloom audit runs/x": "it stands for a finished run: tests/experiments/test_audit.py",
    "fedloom watch": "it runs until Ctrl-C: tests/experiments/test_watch.py runs it",
}
# Settings that shorten what a method does before, or instead of, rounds.
SHORT = {
    "fedgh": {"vgae_epochs": 1, "diffusion_epochs": 1, "diffusion_steps": 2, "contrast_epochs": 1},
    "opfgl": {"condense_steps": 2, "steps": 2, "check_every": 1},
}
# A page with one of these takes seconds: it starts processes, imports plotting, or runs a grid.
TAKES_LONG = re.compile(
    r"fedloom (compare|tune|report) |--plot|--track|--secure|--engine processes"
)
EXAMPLE_FILES = sorted(
    path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")
)
NOTEBOOKS = [path for path in EXAMPLE_FILES if path.suffix == ".ipynb"]
COMMANDS = typer.main.get_command(app).commands
LINES = [
    (page, line)
    for page in EXAMPLES
    for block in blocks((ROOT / page).read_text())
    for line in typed(block)
]


@pytest.fixture
def few_rounds(monkeypatch):
    """`fedloom.run` with one round."""
    original = fedloom.run
    monkeypatch.setattr(
        fedloom,
        "run",
        lambda *args, **more: original(*args, **{**more, "rounds": 1}),
        raising=False,
    )


@needs_cora
def test_quickstart(few_rounds, capsys):
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert re.search(r"FedAvg 0\.\d+, Local 0\.\d+", capsys.readouterr().out)


def test_own_graphs(few_rounds, capsys):
    runpy.run_path(str(ROOT / "examples" / "own_graphs.py"))
    assert "bank-c" in capsys.readouterr().out


def test_own_method(node_federation):
    path = str(ROOT / "examples" / "own_method.py")
    trimmed = run(path, node_federation, model="gcn-2x8", rounds=2)
    plain = run("fedavg", node_federation, model="gcn-2x8", rounds=2)
    assert trimmed.summary["status"] == "completed"
    assert trimmed.summary["history_hash"] != plain.summary["history_hash"]


@pytest.mark.parametrize("example", EXAMPLE_FILES, ids=lambda path: path.name)
def test_examples_import_only_public_modules(example):
    imported = re.findall(r"^\W*(?:from|import) (fedloom[\w.]*)", example.read_text(), re.M)
    assert imported
    assert set(imported) <= {"fedloom", "fedloom.api"}


def outputs(cells: list[dict]) -> list[list[tuple[str, ...]]]:
    """Returns the kinds of output of each code cell of a notebook.

    A kernel may send printed text in one piece or in several, so neighbours of one kind count once.
    """
    kinds = [
        [(out["output_type"], *sorted(out.get("data", ()))) for out in cell["outputs"]]
        for cell in cells
        if cell["cell_type"] == "code"
    ]
    return [[kind for kind, _ in groupby(of_cell)] for of_cell in kinds]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_shows_what_it_computes(path):
    assert path.stat().st_size < 40_000
    cells = json.loads(path.read_text())["cells"]
    assert all(shown for shown in outputs(cells))
    assert not {kind for shown in outputs(cells) for kind, *_ in shown} - {
        "stream",
        "execute_result",
    }
    stored = json.dumps([cell.get("outputs") for cell in cells])
    assert not re.search(r"/(home|root|tmp|work)/|stderr|https?:", stored)


@pytest.mark.slow
@needs_cora
@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = outputs(notebook.cells)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=280, resources=place).execute()
    assert outputs(notebook.cells) == stored


def marked(page: str) -> object:
    """A page as a parameter of a test, with the marks that it needs."""
    text = (ROOT / page).read_text()
    lines = [line for name, line in LINES if name == page and not why_not(page, line)]
    grids = [
        block.text for block in blocks(text) if re.search(r"fedloom\.(compare|tune)\(", block.text)
    ]
    marks = [pytest.mark.slow] if grids or any(map(TAKES_LONG.search, lines)) else []
    return pytest.param(page, marks=[*marks, needs_cora] if 'load("cora")' in text else marks)


def why_not(page: str, line: str) -> str:
    """Says why a line does not run here; "" if it does."""
    return next((why for part, why in SKIPPED.items() if part == page or part in line), "")


@pytest.mark.parametrize("page", [marked(page) for page in EXAMPLES])
def test_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict = {"__name__": "fedloom_page"}
    printed = ""
    for number, block in enumerate(blocks((ROOT / page).read_text())):
        if title := re.match(r"# ([\w.-]+\.\w+)\n", block.text):
            (tmp_path / title[1]).write_text(block.text)
        elif re.fullmatch(r"python no-run: .+", block.info):
            continue
        elif block.info.startswith("python"):
            assert block.info == "python", f"{page}: ```{block.info}: say why: python no-run: why"
            capsys.readouterr()
            exec(compile(block.text, f"{page} block {number}", "exec"), names)
            printed = capsys.readouterr().out
            for promised in re.findall(r"print\(.*\)  # (.+)", block.text):
                assert promised in printed.splitlines(), f"{page} block {number} printed\n{printed}"
        elif block.info == "text":
            assert block.text == printed, f"{page}: the block of Python above prints\n{printed}"
        for line in typed(block):
            if line.startswith("fedloom") and not why_not(page, line):
                arguments = shortened(shlex.split(line)[1:])
                monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
                with pytest.raises(SystemExit) as ended:
                    main()
                ran = f"{page}: {line}\nas fedloom {shlex.join(arguments)}\n"
                assert not ended.value.code, ran + capsys.readouterr().err


def shortened(arguments: list[str]) -> list[str]:
    """Returns a line's arguments with a small graph and as little work as possible."""
    command = arguments[0]
    if arguments[1:2] == ["..."]:
        arguments = [command, "--method", "fedavg", *arguments[2:]]
    if command not in ("run", "compare", "tune", "partition"):
        return arguments
    given = {
        one: two
        for one, two in zip(arguments, [*arguments[1:], ""], strict=True)
        if one.startswith("--")
    }
    is_file = arguments[1:] and arguments[1].endswith(".toml")
    recipe = tomllib.loads(Path(arguments[1]).read_text()) if is_file else {}
    usual = recipe.get("compare", {}).get("datasets") or [
        recipe.get("data", {}).get("dataset", "cora")
    ]
    asked = given.get("--dataset", given.get("--datasets", ""))
    named = [asked] if ":" in asked else asked.split(",") if asked else usual
    added = ["--dataset", ",".join(map(small, named))]
    if command == "partition":
        return [*arguments, *added]
    added += ["--rounds", "1"]
    added += {"compare": ["--seeds", "1"], "tune": ["--trials", "2"]}.get(command, [])
    method = given.get("--method", recipe.get("method", {}).get("name", ""))
    for name, settings in SHORT.items():
        for key, value in settings.items():
            if command == "compare" and name in given.get("--methods", "").split(","):
                added += ["--set", f"{name}.{key}={value}"]
            elif command != "compare" and name == method:
                added += ["--set", f"method.{key}={value}"]
    return [*arguments, *added]


def small(name: str) -> str:
    """Returns a small graph of a named dataset's kind; other graphs are kept."""
    if name not in catalogue():
        return name
    place = list(catalogue()).index(name)  # two datasets are two graphs
    is_graph_task = catalogue()[name].task == "graph"
    return (
        f"synthetic-graphs:graphs={200 + place}"
        if is_graph_task
        else f"synthetic:nodes={400 + place}"
    )


def test_every_skipped_line_exists():
    for part in SKIPPED:
        assert any(part == page or part in line for page, line in LINES), f"no line has {part!r}"


@pytest.mark.parametrize("page", [*EXAMPLES, "CONTRIBUTING.md"])
def test_named_commands_targets_and_files_exist(page):
    """Commands of fedloom, targets of the Makefile, extras and scripts, in blocks and in prose."""
    text = (ROOT / page).read_text()
    inline = re.findall(r"`([^`\n]+)`", prose(text))
    shown = [*inline, *(line for block in blocks(text) for line in typed(block))]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for code in shown:
        if command := re.match(r"fedloom ([a-z]+)", code):
            assert command[1] in COMMANDS, code
        if target := re.match(r"make ([a-z-]+)", code):
            assert target[1] in targets, code
        if extra := re.search(r"fedloom\[([\w,]+)\]", code):
            assert set(extra[1].split(",")) <= set(extras), code
        for path in re.findall(r"(?<![\w/])(?:bench|examples|src)/[\w./-]+\.\w+", code):
            assert (ROOT / path).exists() or "NAME" in path, code
