"""What the documentation shows is run: every example, and the code blocks of the README and of docs/."""

import re
import runpy
from pathlib import Path

import pytest

from fedloom.data.datasets import find
from fedloom.runs import run

ROOT = Path(__file__).resolve().parents[1]
needs_cora = pytest.mark.skipif(
    find("cora").kind == "download", reason="no Cora: not under FEDLOOM_DATA, not beside the project, no graphdatascience package"
)


@needs_cora
def test_quickstart(capsys):
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert re.search(r"FedAvg 0\.\d+, Local 0\.\d+", capsys.readouterr().out)


def test_own_graphs(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_graphs.py"))
    assert "bank-c" in capsys.readouterr().out


def test_own_method(node_federation):
    path = str(ROOT / "examples" / "own_method.py")
    trimmed, plain = run(path, node_federation, model="gcn-2x8", rounds=2), run("fedavg", node_federation, model="gcn-2x8", rounds=2)
    assert trimmed.summary["status"] == "completed"
    assert trimmed.summary["history_hash"] != plain.summary["history_hash"]


@needs_cora
@pytest.mark.parametrize("page", ["README.md", "docs/adding-a-method.md"])
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """Blocks of one page share their names, as a reader would expect who types them in one after another."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    names: dict = {"__name__": "fedloom_page"}
    for number, block in enumerate(blocks):
        title = re.match(r"# (\S+\.py)\n", block)
        if title:
            (tmp_path / title[1]).write_text(block)
        else:
            exec(compile(block, f"{page} block {number}", "exec"), names)
