"""Tables of names that others chose: no spreadsheet, LaTeX or Markdown executes them."""

import csv
import io
import json
import re

import numpy as np
import pytest

import fedloom
from fedloom.experiments.predictions import predictions_of
from fedloom.experiments.report.comparison import compare, to_csv, to_latex, to_markdown
from fedloom.experiments.run_folder import gather

FORMULAS = ("=cmd|' calc'!A0", "+1+2", "-2+3+cmd", "@SUM(A1)", "\t=1", "\r=1", " =1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of local and one of fedavg."""
    folder = tmp_path_factory.mktemp("runs")
    graph = fedloom.load("synthetic:nodes=60,classes=3,features=8")
    federation = fedloom.divide(graph, 2, "random", 0)
    for method in ("local", "fedavg"):
        fedloom.run(method, federation, model="gcn-2x8", rounds=1, out=folder / method)
    return folder


def compared(runs, dataset, method="fedavg"):
    """Returns the comparison of the runs after a stranger has renamed dataset and method."""
    for folder in runs.iterdir():
        path = folder / "summary.json"
        summary = json.loads(path.read_text())
        summary["dataset"] = dataset
        if folder.name == "fedavg":
            summary["method"] = summary["config"]["method"]["name"] = method
        path.write_text(json.dumps(summary))
    return compare(*gather([runs]))


@pytest.mark.parametrize("name", FORMULAS)
def test_no_cell_of_a_csv_table_is_a_formula(runs, name):
    rows = list(csv.reader(io.StringIO(to_csv(compared(runs, name, name)), newline="")))
    texts = [cell for row in rows for cell in row]
    assert not [t for t in texts if t.lstrip(" ").startswith(("=", "+", "@", "\t", "\r"))]
    for cell in texts:
        if cell.startswith("-"):
            float(cell)  # a number
    # The reader of a run folder has replaced the control character.
    shown = f"\ufffd{name[1:]}" if name.startswith("\r") else f"'{name}"
    assert any(cell.startswith(shown) for cell in texts)
    numbers = dict(zip(rows[0], rows[1], strict=True))
    assert 0 <= float(numbers["mean"]) <= 1  # stays a number


def test_predictions_escape_ids_and_classes_and_keep_numbers(tmp_path):
    logits = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=np.float32)
    ids = np.array(["=HYPERLINK(1)", "-5", "plain"])
    found = predictions_of(logits, ids, ("@ok", "+bad"))
    with open(found.to_csv(tmp_path / "p.csv"), newline="") as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows[1:]] == ["'=HYPERLINK(1)", "-5", "plain"]
    assert {row[1] for row in rows[1:]} == {"'@ok", "'+bad"}
    assert all(float(cell) >= 0 for row in rows[1:] for cell in row[2:])


def test_latex_prints_names_and_executes_no_command(runs):
    name = "\\input{passwd}%\n\\write18{id} a^b~c & $x$ #1 {y} _z"
    latex = to_latex(compared(runs, name, "\\newline"))
    assert r"\textbackslash{}input\{passwd\}\% \textbackslash{}write18\{id\}" in latex
    assert r"a\textasciicircum{}b\textasciitilde{}c \& \$x\$ \#1 \{y\} \_z" in latex
    commands = set(re.findall(r"\\([a-zA-Z]+)", latex))
    own = {"begin", "end", "toprule", "midrule", "bottomrule", "pm", "approx", "textbf"}
    assert commands <= own | {"underline", *(c for c in commands if c.startswith("text"))}
    table = latex.partition(r"\begin{tabular}")[0]
    assert all(line.startswith("%") for line in table.splitlines())  # the footnote is one line


def test_markdown_keeps_its_columns_and_has_no_tags(runs):
    name = "a|b <script>alert(1) [x](javascript:1) `c` *d*\n| e |"
    text = to_markdown(compared(runs, name, "m|<img src=x>"))
    assert "<" not in text
    assert r"a\|b &lt;script&gt;alert(1) \[x\](javascript:1) \`c\` \*d\*" in text
    table = text.split("\n\n")[0].splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}
