"""From Python: what objects show, callbacks, logging, and errors that say what to do."""

import asyncio
import logging
import re
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
import pytest
import torch
from tests.documents import ROOT
from torch_geometric.data import Data

import fedloom
from fedloom.api import FedAvg, Method, phase, setting
from fedloom.experiments.source_digest import code_behind


@dataclass(frozen=True)
class Damped(FedAvg):
    """FedAvg with a setting of its own."""

    damping: float = setting(0.1, "how much", at_least=0)


class Undecorated(FedAvg):
    """A setting is declared, but the class is not a dataclass."""

    damping: float = setting(0.1, "how much", at_least=0)


@pytest.fixture
def graph():
    """A small graph."""
    return fedloom.synthetic(nodes=120, classes=3, features=6, seed=0)


def go(method, federation, **more):
    """Runs a method for two rounds."""
    return fedloom.run(method, federation, **{"rounds": 2, "model": "gcn-2x8", **more})


# ---- what objects show ----
def test_a_graph_shows_its_sizes(graph):
    split = fedloom.apply_split(graph, "50/25/25", seed=0)
    parts = ", ".join(f"{int(getattr(split, k).sum())} {k}" for k in ("train", "val", "test"))
    assert repr(split) == (
        f"Graph('synthetic': 120 nodes, {graph.num_edges} edges, 6 features, 3 classes; {parts})"
    )
    several = fedloom.synthetic_graphs(graphs=11)
    assert repr(several).startswith("Graph('synthetic-graphs': 11 graphs, ")


def test_every_kind_of_graph_is_short(graph):
    @dataclass(frozen=True, eq=False)
    class Weighted(fedloom.Graph):
        more: torch.Tensor | None = None

    weighted = Weighted(graph.x, graph.edge_index, graph.y, 3, more=torch.rand(1000))
    assert repr(weighted).startswith("Weighted('graph': 120 nodes, ")
    for cls in fedloom.Graph.__subclasses__():
        assert cls.__repr__ is fedloom.Graph.__repr__


def test_a_graph_that_is_not_valid_has_a_repr(graph):
    assert repr(replace(graph, x=graph.x[:, 0])) == (
        "Graph('synthetic': not valid, check() says why)"
    )


def test_a_federation_shows_its_clients(node_federation):
    assert repr(node_federation) == (
        "Federation('synthetic': 4 clients by random, 211 nodes, 12 features, 3 classes; "
        "79 train, 57 val, 75 test)"
    )
    page = node_federation._repr_html_()
    assert page.count("<tr>") == 5
    assert len(page) < 5000
    many = fedloom.Federation(node_federation.graphs * 10)
    assert "20 more clients" in many._repr_html_()
    assert many._repr_html_().count("<tr>") == 21
    assert repr(fedloom.Federation(())).startswith("Federation('': 0 clients, 0 nodes, no graphs; ")


def test_html_is_escaped_and_loads_nothing(graph, node_federation):
    named = replace(graph, name="<script>alert(1)</script>", class_names=("<b>", "&", "c"))
    result = go("fedavg", fedloom.divide(named, clients=2))
    pages = [
        named._repr_html_(),
        fedloom.divide(named, clients=2)._repr_html_(),
        result._repr_html_(),
    ]
    for page in pages:
        assert "<script" not in page
        assert "&lt;script" in page
        assert not re.search(r"src=|href=|http", page)
    assert "&lt;b&gt;, &amp;, c" in pages[0]


def test_a_result_shows_scores_and_folder(node_federation, tmp_path):
    result = go("fedavg", node_federation, out=tmp_path / "run")
    shown = repr(result)
    assert shown.startswith("Result(fedavg on synthetic, 4 clients by random, gcn-2x8, seed 0: ")
    assert f"accuracy {100 * result.accuracy:.1f} %" in shown
    assert str(tmp_path / "run") in shown
    assert "\n" not in shown
    assert result._repr_html_().count("<tr>") == 5
    (tmp_path / "run" / "summary.json").unlink()
    killed = fedloom.load_run(tmp_path / "run")
    assert repr(killed).startswith("Result(unfinished, last round 2; folder ")
    assert "unfinished" in killed._repr_html_()


def test_history_becomes_a_data_frame(node_federation):
    result = go("fedavg", node_federation)
    frame = result.pandas()
    assert list(frame["round"]) == [1, 2]
    assert list(frame["accuracy"]) == [entry["accuracy"] for entry in result.history]
    assert "clients" not in frame.columns
    clients = result.pandas(clients=True)
    assert list(clients["client"]) == list(node_federation.names) * 2
    last = clients[(clients["round"] == 2) & (clients["client"] == "3")]
    assert last["accuracy"].item() == result.history[-1]["clients"][3]["accuracy"]


def test_a_missing_pandas_is_named(node_federation, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fedloom.ConfigError, match=r"pip install 'fedloom\[tables\]'"):
        go("local", node_federation).pandas()


# ---- callbacks and logging ----
def test_a_function_sees_every_entry_and_may_stop_the_run(node_federation, tmp_path):
    seen = []
    result = go("fedavg", node_federation, callbacks=seen.append)
    assert seen == result.history
    stopped = go("fedavg", node_federation, rounds=9, callbacks=lambda e: e["round"] == 3)
    assert (stopped.summary["status"], stopped.summary["rounds"]) == ("completed", 3)
    whole = go("fedavg", node_federation, rounds=3)
    assert stopped.summary["history_hash"] == whole.summary["history_hash"]


def test_a_callback_is_told_start_rounds_and_end(node_federation, tmp_path):
    calls = []

    class Mine(fedloom.Callback):
        def on_start(self, run):
            calls.append(("start", run["method"], run["engine"], run["folder"]))

        def on_round(self, entry, rounds):
            calls.append(("round", entry["round"], rounds))

        def on_end(self, result):
            calls.append(
                ("end", result.summary["status"], (result.folder / "summary.json").exists())
            )

    folder = tmp_path / "run"
    go("fedavg", node_federation, out=folder, engine="loop", callbacks=[Mine(), lambda e: None])
    assert calls == [
        ("start", "fedavg", "loop", folder),
        ("round", 1, 2),
        ("round", 2, 2),
        ("end", "completed", True),
    ]


def test_an_error_in_a_callback_ends_the_run(node_federation):
    ends = []

    class Mine(fedloom.Callback):
        def on_round(self, entry, rounds):
            raise LookupError("mine")

        def on_end(self, result):
            ends.append((result.summary["status"], result.summary["cause"]))

    with pytest.raises(LookupError, match="mine"):
        go("fedavg", node_federation, callbacks=Mine())
    assert ends == [("failed", "LookupError: mine")]


@pytest.mark.parametrize("wrong", [3, "text", [None], fedloom.Callback])
def test_what_is_no_callback_is_refused(node_federation, wrong):
    with pytest.raises(fedloom.ConfigError, match=r"callbacks\[0\] is .*, must be a function"):
        go("fedavg", node_federation, callbacks=wrong)


def test_runs_are_logged_and_print_nothing(node_federation, caplog, capfd):
    with caplog.at_level(logging.INFO, "fedloom"):
        go("fedavg", node_federation, seed=5)
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    assert {name for name, _ in lines} == {"fedloom.run"}
    texts = [text for _, text in lines]
    assert texts[0].startswith("fedavg on synthetic, seed 5: starts with 4 clients, engine ")
    assert re.fullmatch(
        r"fedavg on synthetic, seed 5: round 2 of 2: .*accuracy \d+\.\d %", texts[2]
    )
    assert "completed, accuracy" in texts[-1]
    assert capfd.readouterr() == ("", "")


def test_a_client_without_training_items_is_a_warning(node_federation, caplog):
    first, *others = node_federation.graphs
    idle = replace(first, train=torch.zeros_like(first.train))
    with caplog.at_level(logging.WARNING, "fedloom"):
        go("fedavg", fedloom.Federation((idle, *others)))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "fedavg on synthetic/0, seed 0: no training item at client 0: its loss is 0" in warnings


# ---- methods as objects ----
def test_a_class_is_a_method_with_its_settings(node_federation):
    by_class = go(Damped, node_federation, damping=0.5)
    by_object = fedloom.run(Damped(damping=0.5, rounds=2), node_federation, model="gcn-2x8")
    assert by_class.summary["config"]["method"]["damping"] == 0.5
    assert by_class.summary["history_hash"] == by_object.summary["history_hash"]
    assert by_class.summary["method"] == "Damped"
    assert go(FedAvg, node_federation).summary["method"] == "fedavg"


def test_a_class_of_an_own_file_has_the_path_of_the_file(node_federation):
    path = ROOT / "examples" / "own_method.py"
    cls = fedloom.method_class(str(path))
    assert go(cls, node_federation).summary["method"] == str(path)


def test_a_class_with_the_name_of_a_method_is_not_that_method(node_federation):
    own = dataclass(frozen=True)(type("FedAvg", (FedAvg,), {"__module__": "__main__"}))
    assert go(own, node_federation).summary["method"] == "own-FedAvg"
    assert fedloom.method_class("FedAvg").__module__ == "fedloom.methods.fedavg"


def defined(text):
    """Returns the class Mine as a notebook defines it: without a file."""
    names = {"__name__": "a_notebook"}
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), names)
    cls = names["Mine"]
    fedloom.core.registry.name_of(cls)
    return cls


NOTEBOOK = """
    from dataclasses import dataclass
    from fedloom.api import FedAvg, setting

    def helper(x):
        return x + {number}

    {before}
    @dataclass(frozen=True)
    class Mine(FedAvg):
        {mu}: float = setting(0.1, "a setting")

        def run(self, server):
            helper(1)
            super(Mine, self).run(server)
"""


def test_the_code_of_a_notebook_is_part_of_the_cache_key():
    keys = {}
    for name, change in {
        "as given": {},
        "again": {},
        "lines moved": {"before": "x = 1"},
        "helper": {"number": 2},
        "setting": {"mu": "nu"},
    }.items():
        defined(NOTEBOOK.format(**{"number": 1, "mu": "mu", "before": "", **change}))
        keys[name] = code_behind("Mine")
    assert keys["as given"] == keys["again"] == keys["lines moved"]
    assert len({keys["as given"], keys["helper"], keys["setting"]}) == 3


# ---- errors that say what to do ----
def data():
    """A graph of PyG."""
    return Data(
        x=torch.rand(4, 2), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.arange(4) % 2
    )


DIVIDE = r"fedloom\.divide\("
WRONG = {
    "a graph only": (lambda g, f: (g,), "Divide the graph first: .*" + DIVIDE),
    "PyG's graph only": (lambda g, f: (data(),), "Divide the graph first: .*" + DIVIDE),
    "a federation only": (lambda g, f: (f,), r'the method is missing.*fedloom\.run\("fedavg"'),
    "a method only": (lambda g, f: ("fedavg",), "federation is missing.*" + DIVIDE),
    "a graph": (lambda g, f: ("fedavg", g), "is a Graph.*divide it first: " + DIVIDE + "graph, "),
    "PyG's graph": (lambda g, f: ("fedavg", data()), "PyG Data.*divide it first: " + DIVIDE),
    "networkx": (lambda g, f: ("fedavg", nx.path_graph(3)), "networkx Graph.*" + DIVIDE),
    "a name of data": (lambda g, f: ("fedavg", "cora"), r"fedloom\.load\('cora'\)"),
    "a list": (lambda g, f: ("fedavg", [g, g]), r"a list of graphs.*fedloom\.Federation\(graphs\)"),
    "a list of PyG's": (lambda g, f: ("fedavg", [data()]), r"Federation\(graphs\).*from_pyg"),
    "a dict": (lambda g, f: ("fedavg", {"a": g}), r"Federation\(list\(graphs\.values"),
    "a number": (lambda g, f: ("fedavg", 10), "federation is 10, must be a Federation"),
    "a method twice": (lambda g, f: ("fedavg", FedAvg()), "it is the first argument"),
    "swapped": (lambda g, f: (f, "fedavg"), r"swapped; write fedloom\.run\('fedavg', federation"),
    "swapped, a graph": (lambda g, f: (g, FedAvg), r"swapped; write .*\(method, fedloom\.divide"),
    "a module": (lambda g, f: (torch.nn.Linear(2, 2), f), r"Linear, a torch module.*model=\.\.\."),
    "a module's class": (lambda g, f: (torch.nn.Linear, f), "Linear, a torch module"),
    "no method": (lambda g, f: (7, f), "method is 7, must be a name"),
    "another class": (lambda g, f: (dict, f), "method is the class dict, must be a name"),
    "undecorated": (lambda g, f: (Undecorated, f), r"write @dataclass\(frozen=True\) above"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_of_run(case, graph, node_federation):
    arguments, words = WRONG[case]
    with pytest.raises(fedloom.ConfigError, match=words) as raised:
        fedloom.run(*arguments(graph, node_federation))
    assert "\n" not in str(raised.value)


def test_settings_must_be_run_settings(node_federation):
    with pytest.raises(fedloom.ConfigError, match=r"RunSettings\(\*\*settings\)"):
        go("fedavg", node_federation, settings={"seed": 1})
    with pytest.raises(fedloom.ConfigError, match="settings is 3, must be a RunSettings"):
        go("fedavg", node_federation, settings=3)


def test_an_unknown_option_names_settings_of_method_and_run(node_federation):
    with pytest.raises(fedloom.ConfigError, match=r"'sed'\. Did you mean 'seed'\?"):
        go("fedavg", node_federation, sed=1)
    with pytest.raises(fedloom.ConfigError, match=r"'dampin'\. Did you mean 'damping'\?"):
        go(Damped, node_federation, dampin=1)


def test_a_method_without_its_decorator_is_refused_wherever_it_is_made(node_federation, tmp_path):
    with pytest.raises(fedloom.ConfigError, match="Undecorated declares the settings damping"):
        Undecorated(damping=0.3)
    path = tmp_path / "mine.py"
    path.write_text(
        "from fedloom.api import FedAvg, setting\n\n\nclass Mine(FedAvg):\n"
        "    mu: float = setting(0.1, 'a setting')\n"
    )
    with pytest.raises(fedloom.ConfigError, match="Mine declares the settings mu"):
        go(str(path), node_federation, mu=0.2)
    decorated = path.read_text().replace("class Mine", "@dataclass\nclass Mine")
    path.write_text("from dataclasses import dataclass\n" + decorated)
    with pytest.raises(fedloom.ConfigError, match=r"write @dataclass\(frozen=True\)"):
        go(str(path), node_federation, mu=0.2)


def test_a_method_without_run_is_refused(node_federation):
    @dataclass(frozen=True)
    class Half(Method):
        @phase(x="float32[]")
        def answer(self, client):
            return {}

    with pytest.raises(fedloom.ConfigError, match="its class Half does not define run"):
        go(Half, node_federation)


@pytest.mark.parametrize(
    ("graphs", "words"),
    [
        (lambda g: g, "one Graph.*fedloom.divide"),
        (lambda g: {"a": g}, "is a dict.*names="),
        (lambda g: [g, data()], r"graphs\[1\] is a PyG Data, must be a Graph: fedloom.from_pyg"),
        (lambda g: [nx.path_graph(2)], r"graphs\[0\] is a networkx Graph.*from_networkx"),
        (lambda g: "cora", "graphs is 'cora', must be a list"),
        (lambda g: [np.zeros(3)], r"graphs\[0\] is a ndarray, must be a Graph"),
    ],
)
def test_wrong_graphs_of_a_federation(graph, graphs, words):
    with pytest.raises(fedloom.DataError, match=words):
        fedloom.Federation(graphs(graph))


def test_a_federation_takes_lists(graph):
    made = fedloom.Federation([graph, graph], names=["a", "b"])
    assert (type(made.graphs), made.names) == (tuple, ("a", "b"))


# ---- version ----
def test_the_version_is_known_with_and_without_an_installation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fedloom.__version__ == project["version"]
    source = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{source}; import fedloom; print(fedloom.__version__)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == project["version"]


# ---- compare ----
SMALL = {"models": "gcn-2x8", "rounds": 2, "seeds": 2, "jobs": 2}


@pytest.mark.slow
def test_compare_takes_names_objects_graphs_and_federations(graph, node_federation, tmp_path):
    methods = ["fedavg", Damped(damping=0.3), {"name": "fedprox", "mu": 0.5},
               {"name": "fedprox", "mu": 0.01}]  # fmt: skip
    found = fedloom.compare(
        methods, [graph, node_federation], clients=[2, 3], out=tmp_path, **SMALL
    )
    assert found.tasks == [
        "synthetic, 2 clients by louvain",
        "synthetic, 3 clients by louvain",
        "synthetic, 4 clients by random",
    ]
    rows = ["local", "fedavg", "Damped", "fedprox (mu=0.5)", "fedprox (mu=0.01)"]
    assert sorted(found.rows) == sorted(rows)
    assert found.rows[0] == "local"
    assert not found.left_out
    frame = found.pandas()
    assert (len(frame), set(frame["seeds"])) == (15, {2})
    alone = go("fedavg", node_federation, seed=1)
    (entry,) = (e for (t, r), e in found.entries.items() if "4 clients" in t and r == "fedavg")
    assert entry.runs[1].summary["history_hash"] == alone.summary["history_hash"]
    assert {row: found.entries[t, row].score for t, row in found.entries if t == found.tasks[0]}
    text, page = repr(found), found._repr_html_()
    assert "fedprox (mu=0.5)" in text
    assert str(entry.score) in text
    assert page.count("<table>") >= 3
    assert found.report(tmp_path / "page.html").stat().st_size > 10_000
    assert {path.name for path in tmp_path.iterdir()} >= {"runs", "data", "table.csv", "page.html"}


@pytest.mark.slow
def test_compare_runs_only_what_is_new(node_federation, tmp_path, caplog):
    first = fedloom.compare("fedavg", node_federation, out=tmp_path, **SMALL)
    with caplog.at_level(logging.INFO, "fedloom.compare"):
        again = fedloom.compare(["fedavg", Damped], node_federation, out=tmp_path, **SMALL)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "4 of 6 runs are cached"
    assert re.match(r"6 of 6: synthetic-random4-Damped-gcn-2x8-s\d-\w+ in ", lines[-1])
    task = first.tasks[0]
    assert again.entries[task, "fedavg"].score == first.entries[task, "fedavg"].score


@pytest.mark.slow
def test_a_method_that_fails_is_left_out_with_a_warning(node_federation, tmp_path):
    @dataclass(frozen=True)
    class Broken(FedAvg):
        def run(self, server):
            raise LookupError("mine")

    with pytest.warns(UserWarning, match="2 of 4 runs did not complete.*LookupError: mine"):
        found = fedloom.compare(Broken, node_federation, out=tmp_path, **SMALL)
    assert found.rows == ["local"]
    assert "left out: 2 runs" in repr(found)
    assert "LookupError: mine" in found._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((["fedagv"], "cora"), {}, "unknown method 'fedagv'.* Did you mean 'fedavg'"),
        (("fedavg", "corra"), {}, "unknown dataset 'corra'"),
        (("fedavg", 3), {}, "data is 3, must be the name of a dataset"),
        (("fedavg", [None]), {}, "data is None, must be the name of a dataset"),
        ((torch.nn.Linear, "cora"), {}, "a torch module"),
        (({"mu": 1}, "cora"), {}, "method.name is None"),
        (("fedprox", "cora"), {"mu": 0.1}, r'one method: methods=\[\{"name": METHOD, "mu"'),
        (("fedavg", "cora"), {"metric": "acuracy"}, "unknown metric 'acuracy'"),
        (("fedavg", "cora"), {"jobs": -1}, "jobs is -1"),
        (("fedavg", "cora"), {"on": "mars"}, "unknown on 'mars'"),
        (("fedavg", "cora"), {"seeds": 0}, "compare.seeds is 0"),
        (("fedavg", "cora"), {"clients": "many"}, "compare.clients is 'many'"),
        (("fedavg", "cora"), {"tables": 3}, "tables is 3, must be a dict"),
        (("fedavg", "cora"), {"tables": {"data": {"dataset": "x"}}}, "is an axis of the grid"),
    ],
)
def test_wrong_arguments_of_compare(arguments, options, words, tmp_path):
    with pytest.raises(fedloom.ConfigError, match=words):
        fedloom.compare(*arguments, out=tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


INTERRUPTED = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
import fedloom

federation = fedloom.divide(fedloom.synthetic(nodes=400, seed=0), clients=4, seed=0)

def press():
    while not list(Path("out").glob("runs/*/history.jsonl")):
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
try:
    fedloom.compare("fedavg", federation, rounds=100_000, seeds=1, out="out", jobs=2)
except KeyboardInterrupt as stopped:
    print(*stopped.__notes__)
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout == "the finished runs are kept: the same call continues the comparison\n"
    for folder in (tmp_path / "out" / "runs").glob("synthetic*"):
        assert fedloom.load_run(folder).summary["status"] == "stopped"


def test_everything_works_inside_a_running_event_loop(node_federation, tmp_path):
    """As in Jupyter, whose cells run in an event loop."""

    async def cell():
        result = go("fedavg", node_federation, out=tmp_path / "run")
        fedloom.report(result, tmp_path / "page.html")
        return fedloom.resume(tmp_path / "run", node_federation)

    assert asyncio.run(cell()).summary["status"] == "completed"


# ---- tune ----
@pytest.mark.slow
def test_tune_gives_settings_for_run(node_federation, tmp_path):
    pytest.importorskip("optuna")
    study = {"trials": 3, "rounds": 2, "model": "gcn-2x8", "out": tmp_path}
    over = {"lr": (0.001, 0.5), "damping": [0.0, 0.5]}
    tuned = fedloom.tune(Damped, node_federation, over=over, **study)
    assert set(tuned.settings) == {"lr", "damping"}
    assert list(tuned.pandas()["trial"]) == [0, 1, 2]
    again = go(Damped, node_federation, **tuned.settings)
    assert again.summary["val_accuracy"] == tuned.best.validation
    assert repr(tuned).startswith("Tuned(method.lr=")
    assert tuned._repr_html_().count("<tr>") == 4
    assert "[data]" not in tuned.recipe.read_text()
    more = fedloom.tune(Damped, node_federation, over=over, **{**study, "trials": 4})
    assert more.trials[:3] == tuned.trials


@pytest.mark.slow
def test_tune_takes_a_graph_and_several_jobs(graph, node_federation, tmp_path):
    pytest.importorskip("optuna")
    study = {"trials": 2, "rounds": 1, "model": "gcn-2x8", "jobs": 2}
    divided = fedloom.tune("fedprox", graph, clients=3, over="mu", out=tmp_path / "a", **study)
    assert "synthetic" in divided.recipe.read_text()
    given = fedloom.tune(
        "fedprox", node_federation, over=["method.mu"], out=tmp_path / "b", **study
    )
    assert len(given.trials) == 2


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedavg", {"clients": 3}, "divided already; drop clients"),
        ("fedavg", {"over": {"lr": 3}}, "over: lr is 3, must be"),
        ("fedavg", {"over": ["learning"]}, "unknown setting of method 'fedavg': 'learning'"),
        ("fedavg", {"sed": 1}, "unknown setting of method 'fedavg': 'sed'"),
        ("fedavg", {"trials": 0}, "trials is 0"),
    ],
)
def test_wrong_arguments_of_tune(method, options, words, node_federation, tmp_path):
    pytest.importorskip("optuna")
    with pytest.raises(fedloom.ConfigError, match=words):
        fedloom.tune(method, node_federation, out=tmp_path, **options)


# ---- report and resume ----
def test_report_of_results_and_folders(node_federation, tmp_path):
    results = [go(name, node_federation, out=tmp_path / name) for name in ("local", "fedavg")]
    page = fedloom.report(results, tmp_path / "a.html")
    assert page == tmp_path / "a.html"
    assert "fedavg" in page.read_text()
    assert fedloom.report(str(tmp_path), tmp_path / "b.html").exists()
    (tmp_path / "fedavg" / "summary.json").unlink()
    with pytest.warns(UserWarning, match="left out: .*fedavg: unfinished"):
        fedloom.report(tmp_path, tmp_path / "c.html")


def test_wrong_arguments_of_report(node_federation, tmp_path):
    with pytest.raises(fedloom.ConfigError, match=r"no folder; use fedloom.run\(..., out=folder\)"):
        fedloom.report(go("local", node_federation), tmp_path / "x.html")
    with pytest.raises(fedloom.ConfigError, match="runs is 3, must be run folders"):
        fedloom.report(3)
    with pytest.raises(fedloom.ConfigError, match="runs contains 3"):
        fedloom.report([3])
    with pytest.raises(fedloom.DataError, match="no completed run"):
        fedloom.report(tmp_path / "nothing", tmp_path / "x.html")


def stop(entry):
    """A callback: Ctrl-C after the second round."""
    if entry["round"] == 2:
        raise KeyboardInterrupt


def test_resume_continues_a_run_from_python(node_federation, tmp_path):
    settings = {"rounds": 4, "checkpoint_every": 1, "damping": 0.2, "seed": 3}
    whole = go(Damped, node_federation, **settings)
    with pytest.raises(KeyboardInterrupt) as raised:
        go(Damped, node_federation, out=tmp_path / "run", callbacks=stop, **settings)
    call = f"fedloom.resume({str(tmp_path / 'run')!r}, federation)"
    assert raised.value.__notes__ == [f"the run is kept: {call} continues it"]
    with pytest.raises(fedloom.ConfigError, match=r"fedloom.resume\(folder, federation\)"):
        fedloom.resume(tmp_path / "run")
    with pytest.raises(fedloom.ConfigError, match="has other data"):
        fedloom.resume(tmp_path / "run", fedloom.Federation(node_federation.graphs[:2]))
    seen = []
    resumed = fedloom.resume(tmp_path / "run", node_federation, callbacks=seen.append)
    assert [entry["round"] for entry in seen] == [2, 3, 4]
    assert resumed.summary["history_hash"] == whole.summary["history_hash"]
    assert fedloom.resume(tmp_path / "run").summary == fedloom.load_run(tmp_path / "run").summary


def test_resume_refuses_what_is_no_run(tmp_path):
    with pytest.raises(fedloom.DataError, match="is not a run folder"):
        fedloom.resume(tmp_path)
