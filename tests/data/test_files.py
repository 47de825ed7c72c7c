"""A user's own graph: round trips, and errors that name the place."""

from __future__ import annotations

import builtins
from dataclasses import fields, replace
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

import fedloom
from fedloom.data.columns import Table
from fedloom.data.encoding import Encoding
from fedloom.data.files import from_folder, from_networkx, from_pyg, to_folder
from fedloom.data.graph import Graph
from fedloom.data.synthetic import synthetic
from fedloom.errors import DataError, FedloomError

NODES = """\
id,label,split,a,b
p,cat,train,1,0.5
q,dog,val,2,-1e3
r,,,3,0
s,cat,test,4,7
"""
EDGES = """\
source,target
p,q
q,r
s,p
q,p
"""


def folder(at: Path, nodes: str = NODES, edges: str = EDGES, settings: str = "") -> Path:
    for name, text in (("nodes.csv", nodes), ("edges.csv", edges), ("graph.toml", settings)):
        (at / name).write_text(text)
    return at


def assert_same(one: Graph, other: Graph) -> None:
    for key in ("x", "edge_index", "y", "train", "val", "test", "edge_weight"):
        mine, theirs = getattr(one, key), getattr(other, key)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs), key
    assert (one.num_classes, one.name) == (other.num_classes, other.name)


# ---- folders ----
def test_folder(tmp_path):
    graph = from_folder(folder(tmp_path))
    assert graph.x.tolist() == [[1, 0.5], [2, -1000], [3, 0], [4, 7]]
    assert graph.y.tolist() == [0, 1, -1, 0]  # cat, dog
    assert graph.num_classes == 2
    # The table lists p-q in both directions. The graph has it once in each direction.
    assert graph.edge_index.tolist() == [[0, 0, 1, 1, 2, 3], [1, 3, 0, 2, 1, 0]]
    assert (graph.train.tolist(), graph.val.tolist()) == (
        [True, False, False, False],
        [False, True, False, False],
    )
    assert graph.test.tolist() == [False, False, False, True]
    assert graph.edge_weight is None
    assert graph.name == tmp_path.name


def test_folder_with_settings(tmp_path):
    settings = """
        nodes = "people.csv"
        edges = "links.tsv"
        id = "who"
        label = "class"
        features = ["x"]
        source = "from"
        target = "to"
        weight = "strength"
        directed = true
        num_classes = 5
        name = "club"
    """
    folder(tmp_path, settings=settings)
    # The table has a byte-order mark and an empty line.
    (tmp_path / "people.csv").write_text("\ufeffwho,note,class,x\n7,hello,2,1\n\n8,,0,2\n")
    (tmp_path / "links.tsv").write_text("to\tfrom\tstrength\n8\t7\t0.5\n")
    graph = from_folder(tmp_path / "graph.toml")
    assert graph.x.tolist() == [[1], [2]]
    assert graph.y.tolist() == [2, 0]
    assert graph.edge_index.tolist() == [[0], [1]]
    assert graph.edge_weight.tolist() == [0.5]
    assert (graph.num_classes, graph.name) == (5, "club")


def test_feature_prefix_and_class_names(tmp_path):
    nodes = "id,label,f_1,note,f_2\n1,b,1,hello,2\n2,a,3,,4\n"
    settings = 'features = "f_"\nclass_names = ["b", "a", "c"]'
    graph = from_folder(folder(tmp_path, nodes, "source,target\n", settings))
    assert graph.x.tolist() == [[1, 2], [3, 4]]
    assert graph.y.tolist() == [0, 1]
    assert graph.num_classes == 3
    assert graph.num_edges == 0


def test_unlabelled_nodes_need_num_classes(tmp_path):
    nodes = "id,a\n1,0\n"
    with pytest.raises(DataError, match="no row has a label in column 'label'"):
        from_folder(folder(tmp_path, nodes, "source,target\n"))
    assert from_folder(
        folder(tmp_path, nodes, "source,target\n", "num_classes = 3")
    ).y.tolist() == [-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": "lable = 'x'"}, "unknown key in .*graph.toml: 'lable'. Did you mean 'label'"),
        ({"settings": "directed = 'no'"}, "graph.toml: directed is 'no', must be true or false"),
        ({"settings": "features = [1]"}, r"features is \[1\], must be text or a list of texts"),
        ({"settings": "num_classes = true"}, "num_classes is True, must be a whole number"),
        (
            {"settings": "num_classes = 2\nclass_names = ['a']"},
            "num_classes is 2, but class_names has 1",
        ),
        ({"settings": "label = "}, "graph.toml: cannot be read"),
        (
            {"settings": "label = 'kind'"},
            "nodes.csv: no column 'kind'. Columns there: id, label, split, a, b",
        ),
        ({"settings": "features = ['a', 'c']"}, "nodes.csv: no column 'c'"),
        ({"settings": "features = 'z_'"}, "nodes.csv: no feature columns"),
        ({"settings": "weight = 'w'"}, "edges.csv: no column 'w'. Columns there: source, target"),
        ({"settings": "nodes = 'nobody.csv'"}, "nobody.csv: no such file"),
        ({"settings": "nodes = 'graph.toml'"}, "tables ending in '.toml' are not known"),
        (
            {"settings": "class_names = ['cat', 'bird']"},
            "line 3, column 'label': label 'dog' is out of range. Valid: cat, bird",
        ),
        ({"settings": "num_classes = 1"}, "2 different labels, but num_classes is 1"),
        (
            {"nodes": NODES.replace("cat", "0").replace("dog", "3"), "settings": "num_classes = 3"},
            "nodes.csv, line 3, column 'label': label '3' is out of range. Valid: 0 to 2",
        ),
        ({"nodes": NODES.replace("cat", "0").replace("dog", "-2")}, "label '-2' is out of range"),
        (
            {"nodes": NODES.replace("-1e3", "much")},
            "nodes.csv, line 3, column 'b': 'much' is not a finite number",
        ),
        ({"nodes": NODES.replace("-1e3", "inf")}, "line 3, column 'b': 'inf' is not a finite"),
        ({"nodes": NODES.replace("-1e3", "1e39")}, "line 3, column 'b': '1e39' is not a finite"),
        (
            {"nodes": NODES.replace("s,cat", "p,cat")},
            "line 5, column 'id': id 'p' is there already, on line 2",
        ),
        ({"nodes": NODES.replace("s,cat", ",cat")}, "line 5, column 'id': empty id"),
        (
            {"nodes": NODES.replace("val", "valid")},
            "line 3, column 'split': 'valid' is none of train, val, test",
        ),
        (
            {"nodes": NODES.replace("r,,,3", "r,,train,3")},
            "train contains item 2, which has no label",
        ),
        ({"nodes": NODES[:-4]}, "nodes.csv, line 5: 4 values under a header of 5 columns"),
        (
            {"nodes": NODES.replace("s,", '"s,')},
            "nodes.csv, line 5: cannot be read: unexpected end of data",
        ),
        ({"nodes": "id,label,a\n"}, "nodes.csv: no nodes, only a header"),
        ({"nodes": ""}, "nodes.csv: empty file"),
        ({"nodes": NODES.replace("a,b", "a,a")}, "nodes.csv: column 'a' is there more than once"),
        (
            {"edges": EDGES.replace("s,p", "s,x")},
            "edges.csv, line 4, column 'target': id 'x' is not in nodes.csv",
        ),
        (
            {"edges": EDGES.replace("source", "src")},
            "edges.csv: no column 'source'. Columns there: src, target",
        ),
        (
            {"edges": "source,target,weight\np,q,1\nq,r,-2\n"},
            "edges.csv: the weight of 'q' -> 'r' is -2, must be 0 or more",
        ),
        (
            {"edges": "source,target,weight\np,q,1\nq,r,\n"},
            "edges.csv, line 3, column 'weight': the weight is missing",
        ),
        (
            {"edges": "source,target,weight\np,q,heavy\n"},
            "edges.csv, line 2, column 'weight': 'heavy' is not a finite number",
        ),
    ],
)
def test_errors_name_the_place(tmp_path, change, message):
    with pytest.raises(FedloomError, match=message) as error:
        from_folder(folder(tmp_path, **change))
    assert "\n" not in str(error.value)


def test_bytes_that_are_not_utf_8(tmp_path):
    folder(tmp_path)
    (tmp_path / "nodes.csv").write_bytes(NODES.encode().replace(b"dog", b"\xff\xfe"))
    with pytest.raises(DataError, match=r"nodes.csv, line 1: cannot be read: .*utf-8"):
        from_folder(tmp_path)


def test_a_folder_without_graph_toml(tmp_path):
    with pytest.raises(DataError, match=r"no graph.toml and no tables: a graph's folder needs"):
        from_folder(tmp_path)
    with pytest.raises(DataError, match="nowhere: no such folder"):
        from_folder(tmp_path / "nowhere")
    folder(tmp_path)
    (tmp_path / "graph.toml").unlink()
    assert from_folder(tmp_path).num_nodes == 4
    with pytest.raises(DataError, match=r"graph.toml: no such file"):
        from_folder(tmp_path / "graph.toml")
    (tmp_path / "edges.csv").unlink()
    (tmp_path / "graph.toml").touch()
    with pytest.raises(DataError, match=r"no table of edges; add edges.csv, or name the file in"):
        from_folder(tmp_path)


# ---- round trips ----
def masked(graph: Graph) -> Graph:
    part = torch.arange(graph.num_nodes) % 4
    y = torch.where(part == 3, -1, graph.y)
    return replace(graph, train=part == 0, val=part == 1, test=part == 2, y=y)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("directed", [False, True])
def test_round_trip(tmp_path, directed, weighted):
    graph = masked(synthetic(nodes=120, features=5, name='a "quoted" name'))
    if directed:
        graph = replace(graph, edge_index=graph.edge_index[:, ::3])
    if weighted:  # with equal weights in both directions
        graph = replace(graph, edge_weight=1 / (1 + graph.edge_index.sum(0).float()))
    where = to_folder(graph, tmp_path / "deep" / "er")
    rows = len((where / "edges.csv").read_text().splitlines()) - 1
    assert rows == (graph.num_edges if directed else graph.num_edges // 2)
    assert_same(from_folder(where), graph)


def test_undirected_edges_with_unequal_weights_stay_directed(tmp_path):
    graph = synthetic(nodes=50)
    graph = replace(graph, edge_weight=torch.arange(graph.num_edges).float())
    assert_same(from_folder(to_folder(graph, tmp_path)), graph)


def test_self_loops_are_preserved(tmp_path):
    graph = Graph(torch.ones(2, 1), torch.tensor([[0, 0, 1], [0, 1, 0]]), torch.tensor([0, 1]), 2)
    assert_same(from_folder(to_folder(graph, tmp_path)), graph)


def test_to_folder_refuses(tmp_path):
    to_folder(synthetic(nodes=50), tmp_path)
    with pytest.raises(DataError, match="exists already"):
        to_folder(synthetic(nodes=50), tmp_path)


# ---- Parquet ----
def test_parquet_gives_the_same_graph(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the extra 'tables' is not installed")
    from pyarrow import csv, parquet

    folder(tmp_path, edges="source,target,weight\n1,2,0.5\n", nodes="id,label,a\n1,x,1\n2,,2.5\n")
    plain = from_folder(tmp_path)
    for table in ("nodes", "edges"):
        options = csv.ConvertOptions(strings_can_be_null=True)
        parquet.write_table(
            csv.read_csv(tmp_path / f"{table}.csv", convert_options=options),
            tmp_path / f"{table}.parquet",
        )
    (tmp_path / "graph.toml").write_text('nodes = "nodes.parquet"\nedges = "edges.parquet"')
    assert parquet.read_schema(tmp_path / "nodes.parquet").field("id").type == pa.int64()
    assert_same(from_folder(tmp_path), plain)
    # Ids are numbers in one table and text in the other.
    (tmp_path / "graph.toml").write_text('edges = "edges.parquet"')
    assert_same(from_folder(tmp_path), plain)
    content = (tmp_path / "nodes.parquet").read_bytes()
    (tmp_path / "graph.toml").write_text('nodes = "nodes.parquet"')
    (tmp_path / "nodes.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"nodes.parquet: cannot be read"):
        from_folder(tmp_path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    folder(tmp_path, settings='nodes = "nodes.parquet"')
    (tmp_path / "nodes.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'fedloom\[tables\]'"):
        from_folder(tmp_path)


# ---- networkx ----
def test_networkx():
    g = nx.Graph()
    g.add_node("b", x=[1.0, 2.0], y="red")
    g.add_node("a", x=np.array([3.0, 4.0]), y="blue")
    g.add_node("c", x=torch.tensor([5.0, 6.0]))
    g.add_edge("b", "a")
    g.add_edge("c", "c")
    graph = from_networkx(g, name="trio")
    assert graph.x.tolist() == [[3, 4], [1, 2], [5, 6]]  # a, b, c
    assert graph.y.tolist() == [0, 1, -1]
    assert graph.edge_index.tolist() == [[0, 1, 2], [1, 0, 2]]
    assert graph.edge_weight is None
    assert (graph.num_classes, graph.name) == (2, "trio")


def test_networkx_directed_weighted_numbered():
    g = nx.DiGraph()
    # These nodes cannot be compared.
    g.add_nodes_from(
        [(1, {"f": 0.5, "c": 3}), ("one", {"f": 1, "c": 0}), ((2,), {"f": 2, "c": -1})]
    )
    g.add_edge("one", 1, weight=2.0)
    g.add_edge((2,), "one")
    graph = from_networkx(g, features="f", label="c")
    assert graph.x.tolist() == [[0.5], [1], [2]]
    assert graph.y.tolist() == [1, 0, -1]
    assert graph.class_names == ("0", "3")
    assert graph.ids.tolist() == ["1", "one", "(2,)"]
    assert graph.edge_index.tolist() == [[1, 2], [0, 1]]
    assert graph.edge_weight.tolist() == [2, 1]


def test_networkx_order_does_not_depend_on_insertion():
    g = nx.gnm_random_graph(20, 40, seed=1)
    for node in g:
        g.nodes[node].update(x=[float(node)], y=node % 3)
    h = nx.Graph()
    h.add_nodes_from(reversed(list(g.nodes(data=True))))
    h.add_edges_from((b, a) for a, b in g.edges)
    assert_same(from_networkx(g), from_networkx(h))


@pytest.mark.parametrize(
    ("nodes", "edge", "message"),
    [
        ({1: {"x": 1.0, "y": 0}, 2: {"y": 0}}, {}, "node 2 has no attribute 'x'"),
        (
            {1: {"x": 1.0, "y": 0}, 2: {"x": [1.0, 2.0], "y": 0}},
            {},
            "node 2 has 2 features, node 1 has 1",
        ),
        ({1: {"x": "blue", "y": 0}}, {}, "node 1, attribute 'x': not numbers"),
        ({1: {"x": float("nan"), "y": 0}}, {}, "NaN"),
        ({1: {"x": 1.0, "y": -3}}, {}, "node 1, attribute 'y': label '-3' is out of range"),
        (
            {1: {"x": 1.0, "y": 0}},
            {"weight": None},
            "edge 1 -> 1, attribute 'weight': not a finite number",
        ),
        ({}, {}, "no nodes"),
    ],
)
def test_networkx_errors(nodes, edge, message):
    g = nx.Graph()
    g.add_nodes_from(nodes.items())
    g.add_edges_from([(1, 1, edge)] if edge else [])
    with pytest.raises(DataError, match=message):
        from_networkx(g)


# ---- PyG ----
def test_pyg(caplog):
    from torch_geometric.data import Data

    edges = torch.tensor([[1, 0, 0, 2, 1], [0, 1, 1, 2, 0]])
    masks = torch.eye(3, dtype=torch.bool)
    data = Data(
        x=torch.ones(3, 2).double(),
        edge_index=edges,
        y=torch.tensor([[0.0], [4.0], [-1.0]]),
        val_mask=masks[0],
    )
    graph = from_pyg(data, name="it")
    assert graph.edge_index.tolist() == [[0, 1, 2], [1, 0, 2]]  # sorted, once
    assert graph.x.dtype == torch.float32
    assert graph.y.tolist() == [0, 4, -1]
    assert graph.num_classes == 5
    assert from_pyg(data, num_classes=9).num_classes == 9
    assert graph.val.tolist() == [True, False, False]
    assert not graph.train.any()
    data.train_mask = torch.tensor([[False, False], [True, False], [False, False]])
    assert from_pyg(data, split=0).train.tolist() == [False, True, False]
    assert not from_pyg(data, split=1).train.any()
    with pytest.raises(FedloomError, match=r"'graph' has no public split 2. Valid: 0 to 1"):
        from_pyg(data, split=2)
    data.edge_weight = torch.tensor([1.0, 2, 2, 3, 1])
    assert from_pyg(data).edge_weight.tolist() == [2, 1, 3]
    data.edge_weight[2] = 5
    assert from_pyg(data).edge_weight.tolist() == [7, 2, 3]  # all repeated pairs are summed
    assert "occur more than once, with different weights: their weights are summed" in caplog.text
    for aggregate, expected in {
        "sum": [7, 2, 3], "mean": [3.5, 1, 3], "max": [5, 1, 3], "count": [2, 2, 1],
    }.items():  # fmt: skip
        assert from_pyg(data, aggregate=aggregate).edge_weight.tolist() == expected
    with pytest.raises(FedloomError, match=r"unknown aggregate: 'median'.* Valid: count, max"):
        from_pyg(data, aggregate="median")


def test_pyg_list_is_a_graph_level_dataset():
    from torch_geometric.data import Data

    one = Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.tensor([1]))
    other = Data(
        x=torch.zeros(1, 1), edge_index=torch.zeros(2, 0, dtype=torch.long), y=torch.tensor([0])
    )
    graph = from_pyg([other, one])
    assert graph.task == "graph"
    assert graph.batch.tolist() == [0, 1, 1]
    assert graph.edge_index.tolist() == [[1, 2], [2, 1]]
    assert graph.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_index": None}, "edge_index is missing: a graph needs edge_index and y"),
        ({"y": None}, "y is missing"),
        ({"y": torch.tensor([0.5, 1.0])}, "y must hold one class number"),
        ({"y": torch.zeros(2, 3)}, "y must hold one class number"),
        ({"y": torch.tensor([0])}, "y has 1 labels for 2 nodes"),
        ({"edge_index": torch.tensor([[0], [2]])}, "edge_index holds 2"),
        # If edges were merged before the check, 0 -> 2 would have the key of 1 -> 0 and disappear.
        ({"edge_index": torch.tensor([[1, 0], [0, 2]])}, "edge_index holds 2"),
    ],
)
def test_pyg_errors(change, message):
    from torch_geometric.data import Data

    good = {
        "x": torch.ones(2, 1),
        "edge_index": torch.tensor([[0], [1]]),
        "y": torch.tensor([0, 1]),
    }
    with pytest.raises(DataError, match=message):
        from_pyg(Data(**(good | change)))


def test_pyg_without_features_gets_degrees_and_says_what_it_drops(caplog):
    from torch_geometric.data import Data

    edges = torch.tensor([[0, 1, 0, 2], [1, 0, 2, 0]])
    data = Data(
        edge_index=edges, y=torch.tensor([0, 1, 0]), edge_attr=torch.ones(4, 2), num_nodes=3
    )
    graph = from_pyg(data, ids=["a", "b", "c"], class_names=["ok", "fraud"])
    assert graph.x.argmax(1).tolist() == [2, 1, 1]
    assert graph.feature_names[2] == "degree=2"
    assert graph.ids.tolist() == ["a", "b", "c"]
    assert graph.classes == ("ok", "fraud")
    assert "graph 'graph': attributes that are not used: edge_attr" in caplog.text


def test_hetero_data_is_refused_in_words():
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["bank"].x = torch.ones(2, 1)
    for given in (data, [data]):
        with pytest.raises(DataError, match=r"HeteroData is not supported.*to_homogeneous\(\)"):
            from_pyg(given)


def test_networkx_multigraph_and_degrees():
    g = nx.MultiGraph()
    g.add_nodes_from("abc", y=0)
    g.add_edge("a", "b", weight=1.0)
    g.add_edge("b", "a", weight=2.5)
    g.add_edge("c", "c", weight=4.0)
    graph = from_networkx(g, aggregate="mean")
    assert graph.edge_index.tolist() == [[0, 1, 2], [1, 0, 2]]
    assert graph.edge_weight.tolist() == [1.75, 1.75, 4]
    assert from_networkx(g, aggregate="count").edge_weight.tolist() == [2, 2, 1]
    assert from_networkx(g).edge_weight.tolist() == [3.5, 3.5, 4]
    assert graph.x.argmax(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["synthetic:nodes=50", "synthetic-graphs"])
def test_a_file_preserves_all_fields_of_any_graph(name, tmp_path):
    how = (
        {"partition": "uniform"}
        if "graphs" in name
        else {"partition": "random", "cross_edges": "known"}
    )
    federation = fedloom.divide(fedloom.load(name), 2, **how)
    graph = federation.graphs[1]
    graph = replace(
        graph,
        ids=np.array([f"konto {k} 💶" for k in range(graph.num_items)]),
        class_names=tuple(f"class {c}" for c in range(graph.num_classes)),
        feature_names=tuple(f"f{k}" for k in range(graph.num_features)),
        encoding=Encoding.of({"a": "number"}).fit(Table({"a": np.arange(3.0)}, 3)),
    )
    again = fedloom.from_file(fedloom.to_file(graph, tmp_path / "graph.safetensors"))
    for field in fields(Graph):
        one, other = getattr(graph, field.name), getattr(again, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), field.name
        elif field.name == "ids":
            assert one.tolist() == other.tolist()
        elif field.name == "seconds_loading":
            assert other > 0
        elif field.init:
            assert one == other, field.name


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = fedloom.to_file(fedloom.load("synthetic:nodes=50"), tmp_path / "graph.safetensors")
    with pytest.raises(DataError, match="exists already"):
        fedloom.to_file(fedloom.load("synthetic:nodes=50"), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"graph\.safetensors' is not a graph's"):
        fedloom.from_file(path)
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04N.")
    for other in ("pickle.pt", "none.safetensors"):
        with pytest.raises(DataError, match=other):
            fedloom.from_file(tmp_path / other)
