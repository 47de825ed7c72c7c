"""What the documentation shows is run: every example, and every page of the README and of docs/ from top to bottom.

A page is run in an empty folder: blocks of Python with names in common, blocks that begin with a file's name (`# grid.toml`) written
down, and every `fedloom` line, made short. What is made shorter is the work, not the line: it runs a round on a small graph.
"""

import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from tests.documents import EXAMPLES, ROOT, blocks, prose, typed

from fedloom.cli import app, main
from fedloom.data.datasets import catalogue, find
from fedloom.experiments.run import run

needs_cora = pytest.mark.skipif(
    find("cora").kind == "download",
    reason="no Cora: not under FEDLOOM_DATA, not beside the project, no graphdatascience package",
)
# Lines that are not run here: part of a line, or a page, and why.
SKIPPED = {
    "docs/deploy.md": "tests/deploy runs the commands of this page",
    "--engine flower": "a process for every client takes a while to start: tests/deploy runs this engine",
    "fedloom watch": "it goes on until Ctrl-C: tests/test_watch.py runs it",
}
# What takes long in a method before, or instead of, rounds.
SHORT = {
    "fedgh": {"vgae_epochs": 1, "diffusion_epochs": 1, "diffusion_steps": 2, "contrast_epochs": 1},
    "opfgl": {"condense_steps": 2, "steps": 2, "check_every": 1},
}
COMMANDS = typer.main.get_command(app).commands
LINES = [
    (page, line)
    for page in EXAMPLES
    for block in blocks((ROOT / page).read_text())
    for line in typed(block)
]


@needs_cora
def test_quickstart(capsys):
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert re.search(r"FedAvg 0\.\d+, Local 0\.\d+", capsys.readouterr().out)


def test_own_graphs(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_graphs.py"))
    assert "bank-c" in capsys.readouterr().out


def test_own_method(node_federation):
    path = str(ROOT / "examples" / "own_method.py")
    trimmed, plain = (
        run(path, node_federation, model="gcn-2x8", rounds=2),
        run("fedavg", node_federation, model="gcn-2x8", rounds=2),
    )
    assert trimmed.summary["status"] == "completed"
    assert trimmed.summary["history_hash"] != plain.summary["history_hash"]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=needs_cora if 'load("cora")' in (ROOT / page).read_text() else ())
        for page in EXAMPLES
    ],
)
def test_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    names: dict = {"__name__": "fedloom_page"}
    printed = ""
    for number, block in enumerate(blocks((ROOT / page).read_text())):
        if title := re.match(r"# ([\w.-]+\.\w+)\n", block.text):
            (tmp_path / title[1]).write_text(block.text)
        elif re.fullmatch(r"python no-run: .+", block.info):
            continue
        elif block.info.startswith("python"):
            assert block.info == "python", (
                f"{page}: ```{block.info}: what must not run says why: ```python no-run: the reason"
            )
            capsys.readouterr()
            exec(compile(block.text, f"{page} block {number}", "exec"), names)
            printed = capsys.readouterr().out
            for promised in re.findall(r"print\(.*\)  # (.+)", block.text):
                assert promised in printed.splitlines(), f"{page} block {number} printed\n{printed}"
        elif block.info == "text":
            assert block.text == printed, (
                f"{page}: what stands under a block of Python is what it prints:\n{printed}"
            )
        for line in typed(block):
            if line.startswith("fedloom") and not why_not(page, line):
                arguments = shortened(shlex.split(line)[1:])
                monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
                with pytest.raises(SystemExit) as ended:
                    main()
                assert not ended.value.code, (
                    f"{page}: {line}\nas fedloom {shlex.join(arguments)}\n{capsys.readouterr().err}"
                )


def why_not(page: str, line: str) -> str:
    """Why a line is not run here; empty if it is."""
    return next((why for part, why in SKIPPED.items() if part == page or part in line), "")


def shortened(arguments: list[str]) -> list[str]:
    """A line's arguments, with a small graph in place of a named one and as little as possible to do."""
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
    recipe = (
        tomllib.loads(Path(arguments[1]).read_text())
        if arguments[1:] and arguments[1].endswith(".toml")
        else {}
    )
    told = recipe.get("compare", {}).get("datasets") or [
        recipe.get("data", {}).get("dataset", "cora")
    ]
    asked = given.get("--dataset", given.get("--datasets", ""))
    named = [asked] if ":" in asked else asked.split(",") if asked else told
    added = ["--dataset", ",".join(map(small, named))]
    if command == "partition":
        return [*arguments, *added]
    added += [
        "--rounds",
        "1",
        *{"compare": ["--seeds", "1"], "tune": ["--trials", "2"]}.get(command, []),
    ]
    method = given.get("--method", recipe.get("method", {}).get("name", ""))
    for name, settings in SHORT.items():
        for key, value in settings.items():
            if command == "compare" and name in given.get("--methods", "").split(","):
                added += ["--set", f"{name}.{key}={value}"]
            elif command != "compare" and name == method:
                added += ["--set", f"method.{key}={value}"]
    return [*arguments, *added]


def small(name: str) -> str:
    """A graph of a named dataset's kind that takes no time; one's own, and made-up ones, as they are."""
    if name not in catalogue():
        return name
    place = list(catalogue()).index(name)  # two datasets are two graphs
    return (
        f"synthetic-graphs:graphs={200 + place}"
        if catalogue()[name].task == "graph"
        else f"synthetic:nodes={400 + place}"
    )


def test_nothing_is_skipped_in_vain():
    for part in SKIPPED:
        assert any(part == page or part in line for page, line in LINES), (
            f"nothing matches {part!r}"
        )


@pytest.mark.parametrize("page", EXAMPLES)
def test_what_a_page_names_is_there(page):
    """Commands of fedloom, targets of the Makefile, extras, scripts: in blocks and in running text."""
    text = (ROOT / page).read_text()
    inline = re.findall(r"`([^`\n]+)`", prose(text))
    shown = [*inline, *(line for block in blocks(text) for line in typed(block))]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for code in shown:
        if command := re.match(r"fedloom ([a-z]+)", code):
            assert command[1] in COMMANDS, code
        if target := re.match(r"make ([a-z-]+)", code):
            assert target[1] in targets, code
        if extra := re.search(r"fedloom\[([\w,]+)\]", code):
            assert set(extra[1].split(",")) <= set(extras), code
        for path in re.findall(r"(?<![\w/])(?:bench|recipes|examples)/[\w./-]+\.\w+", code):
            assert (ROOT / path).exists(), code
