"""Folders of tables as people have them: formats, delimiters, repeated pairs, kinds of columns."""

from __future__ import annotations

import gzip
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data import table_files
from fedloom.data.encoding import Encoding
from fedloom.data.graph import Graph
from fedloom.data.synthetic import synthetic, synthetic_graphs
from fedloom.data.table_files import TableFile
from fedloom.data.tables import from_folder, read_folder, to_folder
from fedloom.errors import DataError, FedloomError

NODES = "id,label,a\np,0,1\nq,1,2\nr,0,3\n"
EDGES = "source,target,amount,when\np,q,10,mon\nq,p,2,tue\np,q,10,mon\nr,r,5,wed\n"
ACCOUNTS = """\
id,label,country,vip,opened,balance
p,fraud,DE,yes,2024-01-01,10
q,ok,FR,no,2024-01-03,
r,ok,,yes,2024-01-05,30
"""


def folder(at: Path, settings: str | None = "", **tables: str) -> Path:
    for name, text in ({"nodes": NODES, "edges": EDGES} | tables).items():
        (at / f"{name}.csv").write_text(text)
    if settings is not None:
        (at / "graph.toml").write_text(settings)
    return at


# ---- repeated pairs ----
@pytest.mark.parametrize(
    ("aggregate", "directed", "expected"),
    [
        ("sum", "false", [22, 22, 5]),
        ("mean", "false", [22 / 3, 22 / 3, 5]),
        ("max", "false", [10, 10, 5]),
        ("count", "false", [3, 3, 1]),
        ("sum", "true", [20, 2, 5]),
        ("mean", "true", [10, 2, 5]),
        ("count", "true", [2, 1, 1]),
    ],
)
@pytest.mark.parametrize("style", ["flat", "table"])
def test_repeated_pairs_are_aggregated(tmp_path, aggregate, directed, expected, style):
    settings = f'weight = "amount"\naggregate = "{aggregate}"\ndirected = {directed}\n'
    settings = settings if style == "flat" else f'[edges]\nfile = "edges.csv"\n{settings}'
    graph = from_folder(folder(tmp_path, settings))
    assert graph.edge_index.tolist() == [[0, 1, 2], [1, 0, 2]]
    assert graph.edge_weight.tolist() == pytest.approx(expected)


def test_the_default_sums_different_weights_and_says_so(tmp_path, caplog):
    graph = from_folder(folder(tmp_path, 'weight = "amount"'))
    assert graph.edge_weight.tolist() == [22, 22, 5]
    assert "edges.csv: 2 pairs occur more than once, with different weights: their" in caplog.text
    caplog.clear()
    equal = "source,target,amount\np,q,10\nq,p,10\n"  # an undirected edge, listed twice
    graph = from_folder(folder(tmp_path, 'weight = "amount"', edges=equal))
    assert graph.edge_weight.tolist() == [10, 10]
    assert not caplog.text


def test_large_sums_are_exact(tmp_path):
    edges = "source,target,weight\n" + "p,q,16777217\n" * 3 + "p,q,1\n"
    graph = from_folder(folder(tmp_path, "directed = true", edges=edges))
    assert graph.edge_weight.tolist() == [50331652]


def test_columns_of_edges_become_features_of_nodes(tmp_path, caplog):
    settings = """
        directed = true
        weight = "amount"
        [encoding]
        scale = "none"
        [edge_features]
        sent = {column = "amount", by = "source", aggregate = "sum"}
        largest = {column = "amount", by = "target", aggregate = "max"}
        rows = {by = "both", aggregate = "count"}
        usual = {column = "amount", by = "both", aggregate = "mean"}
    """
    graph = from_folder(folder(tmp_path, settings))
    assert graph.feature_names == ("a", "sent", "largest", "rows", "usual")
    expected = [[1, 20, 2, 3, 22 / 3], [2, 2, 10, 3, 22 / 3], [3, 5, 5, 2, 5]]
    np.testing.assert_allclose(graph.x, expected, rtol=1e-6)
    assert "edges.csv: columns that are not used: when." in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('aggregate = "median"', "unknown aggregate in .*graph.toml: 'median'"),
        ('aggregate = "sum"', "aggregate is 'sum', but .*edges.csv has no column 'weight'"),
        ('[edges]\nweigth = "amount"', r"unknown key of \[edges\] in .*'weigth'. Did you mean"),
        ('weight = "amount"\n[edges]\nweight = "when"', r"weight of \[edges\] is given a second t"),
        ("[nodes]\nfile = 3", "nodes is 3, must be text"),
        ("[edge_features]\ns = 3", "edge_features.s is 3, must be a table such as"),
        ("[edge_features]\ns = {of = 1}", "unknown key of .*edge_features.s: 'of'"),
        ("[edge_features]\ns = {by = 'left'}", "edge_features.s.by is 'left', must be source or"),
        ("[edge_features]\ns = {by = 'both'}", "edge_features.s.aggregate is None, must be one of"),
        (
            "[edge_features]\ns = {by = 'both', aggregate = 'sum'}",
            "edge_features.s.column is missing: give a table",
        ),
        (
            "[edge_features]\ns = {by = 'both', aggregate = 'sum', column = 'x'}",
            "edges.csv: no column 'x'. Columns there: source, target, amount, when",
        ),
        (
            "[edge_features]\ns = {by = 'both', aggregate = 'sum', column = 'when'}",
            "edges.csv, line 2, column 'when': 'mon' is not a finite number",
        ),
        (
            "[edge_features]\na = {by = 'both', aggregate = 'count'}",
            "edge_features.a: nodes.csv has a column of that name",
        ),
        ("[columns]\nb = 'number'", "columns.b: no feature has that name. Features: a"),
        ("[columns]\na = 'numbr'", "graph.toml: columns.a.kind: 'numbr'. Did you mean 'number'"),
        ("[encoding]\nbits = 99", "graph.toml: encoding.bits is 99, must be a whole number from"),
        ("columns = 3", "columns is 3, must be a table"),
        ("delimiter = ',,'", "delimiter is ',,', must be one character"),
    ],
)
def test_declarations_name_the_place(tmp_path, settings, message):
    with pytest.raises(FedloomError, match=message) as error:
        from_folder(folder(tmp_path, settings))
    assert "\n" not in str(error.value)


# ---- kinds of columns ----
def test_columns_of_all_kinds_without_a_declaration(tmp_path, caplog):
    graph = from_folder(folder(tmp_path, None, nodes=ACCOUNTS))
    names = graph.feature_names
    assert names[2:] == ("country=other", "vip", "opened", "balance")
    assert graph.encoding.kinds == ("category", "boolean", "date", "number")
    np.testing.assert_allclose(graph.x[:, -1], np.array([-1.2247449, 0, 1.2247449]), rtol=1e-6)
    assert graph.class_names == ("fraud", "ok")
    assert graph.ids.tolist() == ["p", "q", "r"]
    assert "nodes.csv: columns are encoded: country (category), vip (boolean), op" in caplog.text
    many = Encoding.of({f"c{k}": "number" for k in range(9)})
    assert many.described().endswith("c7 (number) and 1 more")


def test_numbers_without_gaps_stay_as_they_are(tmp_path):
    graph = from_folder(folder(tmp_path))
    assert graph.x.tolist() == [[1], [2], [3]]
    assert graph.feature_names == ("a",)
    assert graph.encoding is None
    scaled = from_folder(folder(tmp_path, "[encoding]\nscale = 'standard'"))
    assert scaled.x.mean() == pytest.approx(0)


def test_a_later_table_is_encoded_like_the_first(tmp_path):
    first = from_folder(folder(tmp_path, None, nodes=ACCOUNTS))
    # Another order, another country, codes that look like numbers, and a column that is not used.
    later = "balance,vip,id,country,opened,note\n50,1,z,007,2024-01-03,x\n10,0,y,DE,2024-01-01,\n"
    (tmp_path / "new").mkdir()
    where = folder(tmp_path / "new", None, nodes=later, edges="source,target\nz,y\n")
    graph = from_folder(where, encoding=first.encoding, class_names=first.class_names)
    assert graph.feature_names == first.feature_names
    assert graph.y.tolist() == [-1, -1]
    assert graph.class_names == first.class_names
    assert torch.equal(graph.x[1, :4], first.x[0, :4] * torch.tensor([1.0, 1, 1, 0]))
    assert graph.x[0, 2] == 1  # country=other
    with pytest.raises(DataError, match="no row has a label"):
        from_folder(where)
    (where / "nodes.csv").write_text("id,country\nz,DE\ny,DE\n")
    with pytest.raises(DataError, match=r"nodes.csv: no column 'vip'. Columns there: id, country"):
        from_folder(where, encoding=first.encoding, class_names=first.class_names)


def test_no_feature_columns_give_degrees(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    edges = "source,target\np,q\np,r\n"
    graph = from_folder(folder(tmp_path, None, nodes="id,label\np,0\nq,1\nr,1\n", edges=edges))
    assert graph.x.argmax(1).tolist() == [2, 1, 1]
    assert "no feature columns: the features are the nodes' degrees" in caplog.text


def test_columns_that_are_all_ignored(tmp_path, caplog):
    graph = from_folder(folder(tmp_path, "[columns]\na = 'ignore'"))
    assert graph.feature_names[0] == "degree=0"
    rows = [f"{k},{k % 2},person {k}" for k in range(150)]
    nodes, edges = "\n".join(["id,label,who", *rows]), "source,target\n1,2\n"
    with pytest.raises(DataError, match=r"nodes.csv: all columns are ignored, no feature is left"):
        from_folder(folder(tmp_path, None, nodes=nodes, edges=edges))
    assert "column 'who' is ignored: it has more than 100 different texts" in caplog.text


def test_a_column_without_a_name_is_left_out(tmp_path, caplog):
    graph = from_folder(folder(tmp_path, None, nodes=",id,label,a\n0,p,0,1\n1,q,1,2\n2,r,0,3\n"))
    assert graph.feature_names == ("a",)
    assert "a column without a name is left out" in caplog.text


# ---- labels ----
@pytest.mark.parametrize(
    ("labels", "y", "names"),
    [
        ("1 2 3", [0, 1, 2], ("1", "2", "3")),
        ("10 2 10", [1, 0, 1], ("2", "10")),
        ("0 1 1", [0, 1, 1], ()),
        ("5 -1 9", [0, -1, 1], ("5", "9")),
        ("b a b", [1, 0, 1], ("a", "b")),
        ("0 a -1", [1, 2, 0], ("-1", "0", "a")),
    ],
)
def test_labels_are_compacted_and_keep_their_names(tmp_path, labels, y, names):
    rows = [f"{key},{label},1" for key, label in zip("pqr", labels.split(), strict=True)]
    graph = from_folder(folder(tmp_path, nodes="\n".join(["id,label,a", *rows])))
    assert graph.y.tolist() == y
    assert graph.class_names == names


def test_classes_by_name(tmp_path):
    nodes = NODES.replace(",0,", ",ok,").replace(",1,", ",fraud,")
    where = folder(tmp_path, nodes=nodes)
    assert from_folder(where).y.tolist() == [1, 0, 1]
    graph = from_folder(where, class_names=["ok", "fraud", "unsure"])
    assert graph.y.tolist() == [0, 1, 0]
    assert graph.num_classes == 3
    with pytest.raises(DataError, match="has the class 'fraud', which is not among the agreed"):
        from_folder(where, class_names=["ok", "bad"])


# ---- formats ----
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found(tmp_path, delimiter):
    nodes = 'id,label,a,"no, te; x|y"\np,0,1,"a;b,c|d\te"\nq,1,2,\nr,0,3,"x"\n'
    rows = [r.split(",", 3) for r in nodes.splitlines()]
    text = "\n".join(delimiter.join(row) for row in rows)
    settings = 'features = ["a"]\nweight = "amount"\naggregate = "sum"'
    where = folder(tmp_path, settings, nodes=text, edges=EDGES.replace(",", delimiter))
    graph = from_folder(where)
    assert graph.x.tolist() == [[1], [2], [3]]
    assert graph.edge_weight.tolist() == [22, 22, 5]
    assert TableFile.open(where / "nodes.csv", ["id"]).delimiter == delimiter


def test_a_delimiter_that_is_in_the_cells_is_not_taken(tmp_path):
    # Each row has one semicolon in a text, and several commas.
    nodes = "id,label,a,note\np,0,1,a;b\nq,1,2,c;d\nr,0,3,e;f\n"
    graph = from_folder(folder(tmp_path, 'features = ["a"]', nodes=nodes))
    assert graph.x.tolist() == [[1], [2], [3]]
    # A declared delimiter is taken as it is.
    with pytest.raises(DataError, match=r"no column 'id'. Columns there: id,label,a"):
        from_folder(folder(tmp_path, 'delimiter = ";"'))
    # A decimal comma is not a delimiter that loses half of the number.
    nodes = "id;label;a\np;0;1,5\nq;1;2,5\nr;0;3,5\n"
    with pytest.raises(DataError, match="line 2, column 'a': '1,5' is not a finite number"):
        from_folder(folder(tmp_path, "[columns]\na = 'number'", nodes=nodes))


def test_gzip(tmp_path):
    plain = from_folder(folder(tmp_path))
    for table in ("nodes", "edges"):
        path = tmp_path / f"{table}.csv"
        (tmp_path / f"{table}.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert torch.equal(from_folder(tmp_path).x, plain.x)
    (tmp_path / "nodes.csv.gz").write_bytes(gzip.compress(NODES.encode())[:-9])
    with pytest.raises(
        DataError, match=r"nodes.csv.gz, line 4: cannot be read: Compressed file ended"
    ):
        from_folder(tmp_path)


def test_parquet_is_found_by_its_name_and_by_its_content(tmp_path, caplog):
    pd = pytest.importorskip("pandas", reason="the extra 'tables' is not installed")
    pytest.importorskip("pyarrow", reason="the extra 'tables' is not installed")
    plain = from_folder(folder(tmp_path, None, nodes=ACCOUNTS))
    nodes = pd.read_csv(tmp_path / "nodes.csv", parse_dates=["opened"])
    nodes["vip"] = nodes["vip"] == "yes"
    nodes["country"] = nodes["country"].astype("category")
    nodes.to_parquet(tmp_path / "nodes.parquet")
    pd.read_csv(tmp_path / "edges.csv").to_parquet(tmp_path / "edges.parquet")
    assert torch.equal(from_folder(tmp_path).x, plain.x)
    assert "nodes.csv is read; nodes.parquet is not. To choose, set nodes in" in caplog.text
    for table in ("nodes", "edges"):
        (tmp_path / f"{table}.csv").unlink()
    again = from_folder(tmp_path)
    assert torch.equal(again.x, plain.x)
    assert again.feature_names == plain.feature_names
    (tmp_path / "nodes.parquet").rename(tmp_path / "nodes.csv")
    assert torch.equal(from_folder(tmp_path).x, plain.x)
    (tmp_path / "nodes.csv").write_text("no table")
    (tmp_path / "nodes.csv").rename(tmp_path / "nodes.parquet")
    with pytest.raises(DataError, match=r"nodes.parquet: cannot be read: it is not a Parquet file"):
        from_folder(tmp_path)
    frame = pd.DataFrame({"id": ["p", "q", "r"], "label": [0, 1, 0], "v": [[1], [2], [3]]})
    frame.to_parquet(tmp_path / "nodes.parquet")
    with pytest.raises(DataError, match=r"column 'v' holds list<.*>, must be numbers or texts"):
        from_folder(tmp_path)


def test_chunks_do_not_matter(tmp_path, monkeypatch):
    rows = [f"n{k},{k % 2},{k},{'x' if k == 70 else k % 5},{k}" for k in range(100)]
    nodes = "\n".join(["id,label,a,code,zip", *rows])
    settings = "[columns]\ncode = 'category'\nzip = 'ignore'"
    where = folder(tmp_path, settings, nodes=nodes, edges="source,target\nn0,n1\n")
    whole = from_folder(where)
    monkeypatch.setattr(table_files, "CHUNK_ROWS", 7)
    chunked = from_folder(where)
    assert torch.equal(whole.x, chunked.x)
    # A column whose later rows are texts was read as numbers first. Nothing of it is lost.
    rows = [f"n{k},{k % 2},{'0' + str(k % 3) if k < 60 else 'x'}" for k in range(200)]
    nodes = "\n".join(["id,label,code", *rows])
    graph = read_folder(folder(tmp_path, None, nodes=nodes, edges="source,target\nn0,n1\n"))
    assert set(graph.table.columns["code"]) == {"00", "01", "02", "x"}


def test_lines_are_those_of_the_file(tmp_path):
    nodes = 'id,label,a,note\n\np,0,1,"two\nlines"\n\nq,1,2,\nr,0,x,\n'
    with pytest.raises(DataError, match=r"nodes.csv, line 7, column 'a': 'x' is not a finite"):
        from_folder(folder(tmp_path, 'features = ["a"]', nodes=nodes))


# ---- many small graphs ----
GRAPHS = {
    "graphs": "id,label,split\ng1,toxic,train\ng2,fine,test\n",
    "nodes": "id,graph,mass\n1,g2,5\n1,g1,1\n2,g1,2\n2,g2,6\n",
    "edges": "graph,source,target\ng1,1,2\ng2,2,1\n",
}


def test_many_small_graphs(tmp_path):
    graph = from_folder(folder(tmp_path, None, **GRAPHS))
    assert graph.task == "graph"
    assert graph.batch.tolist() == [0, 0, 1, 1]
    assert graph.x.flatten().tolist() == [1, 2, 5, 6]
    assert graph.edge_index.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert graph.y.tolist() == [1, 0]
    assert graph.classes == ("fine", "toxic")
    assert graph.ids.tolist() == ["g1", "g2"]
    assert (graph.train.tolist(), graph.test.tolist()) == ([True, False], [False, True])


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("nodes", "1,g2", "1,g3", "nodes.csv, line 2, column 'graph': graph 'g3' is not in"),
        ("nodes", "2,g1", "1,g1", "line 4, column 'id': id '1' is there already, on line 3"),
        ("edges", "g1,1,2", "g1,1,9", "line 2, column 'target': id '9' of graph 'g1' is not in"),
        ("graphs", "g2,", "g1,", "graphs.csv, line 3, column 'id': id 'g1' is there already"),
        ("graphs", "g2,fine", "g2,", "test contains item 1, which has no label"),
        ("nodes", "graph", "of", "nodes.csv: no column 'graph'"),
        ("graphs", "fine,test\n", "fine,\ng3,fine,\n", "line 4, column 'id': graph 'g3' has no"),
    ],
)  # fmt: skip
def test_errors_in_many_small_graphs(tmp_path, table, old, new, message):
    with pytest.raises(DataError, match=message):
        from_folder(folder(tmp_path, None, **GRAPHS | {table: GRAPHS[table].replace(old, new)}))


def test_edges_between_small_graphs_are_refused(tmp_path):
    nodes = "id,graph,mass\na,g1,1\nb,g2,2\n"
    edges = "source,target\na,b\n"
    with pytest.raises(DataError, match="line 2, column 'target': the edge connects nodes of two"):
        from_folder(folder(tmp_path, None, **GRAPHS | {"nodes": nodes, "edges": edges}))


def assert_same(one: Graph, other: Graph) -> None:
    for key in ("x", "edge_index", "y", "train", "val", "test", "edge_weight", "batch"):
        mine, theirs = getattr(one, key), getattr(other, key)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), key
    for key in ("num_classes", "name", "class_names"):
        assert getattr(one, key) == getattr(other, key), key
    assert one.item_ids.astype(str).tolist() == other.item_ids.astype(str).tolist()


def test_round_trip_with_names(tmp_path):
    graph = synthetic(nodes=30, classes=3, features=4)
    graph = replace(
        graph,
        ids=np.array([f"konto, {k}" for k in range(30)]),
        class_names=("ok", "fraud", "über 💶"),
        feature_names=("amount", "country=DE", "a,b", "x"),
    )
    again = from_folder(to_folder(graph, tmp_path / "names"))
    assert_same(again, graph)
    assert again.feature_names == graph.feature_names
    graphs = synthetic_graphs(graphs=9, classes=2, seed=1)
    part = torch.arange(9) % 3
    graphs = replace(graphs, train=part == 0, val=part == 1, test=part == 2)
    assert_same(from_folder(to_folder(graphs, tmp_path / "many")), graphs)
    named = replace(graphs, ids=np.array([f"m{k}" for k in range(9)]), class_names=("a", "b"))
    assert_same(from_folder(to_folder(named, tmp_path / "named")), named)


def test_a_folder_without_graph_toml_is_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    folder(tmp_path / "shop", None)
    assert fedloom.load("shop").num_nodes == 3
