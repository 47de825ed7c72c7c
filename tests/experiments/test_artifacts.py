"""Pictures: what clients show of themselves after a run, in every engine and after a resume; against dense matrices; embeddings in 2-D."""

import base64
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from scipy.sparse import csr_matrix, random_array
from sklearn.metrics import silhouette_score
from tests.methods.test_fedgh import SMALL

from fedloom.core.message import flatten
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.engines.loop import Engine as Loop
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.embeddings import embed, reduced
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.report.artifacts import layout, pictures
from fedloom.experiments.run import run
from fedloom.methods._shared import cells as binned
from fedloom.methods.fedgh import SHOWN_LINKS, SHOWN_NODES, between, neighbourhood, room
from fedloom.nn.build import build_model
from fedloom.nn.weights import load_weights

STRUCT = {"hops": 3, "p": 4, "d_s": 8, "hidden": "6"}
GIVEN = {"fedgh": {**SMALL, "epochs": 1}, "fedstruct": STRUCT}
MODELS = {"fedgh": "gcn-2x8", "fedstruct": "dgcn-2x8"}
ENGINES = ("stacked", "wire", "processes", "ray")
SYNTHETIC = {
    "data": {
        "dataset": "synthetic:nodes=300,classes=3,features=16,homophily=0.9",
        "split": "40/30/30",
    },
    "partition": {"name": "louvain", "clients": 3},
    "model": {"name": "gcn-2x8", "dropout": 0.2},
    "method": {"name": "fedavg", "rounds": 40},
}


@pytest.fixture
def play(node_federation, cross_federation):
    """Runs a method for two rounds on the contract's federation."""

    def play(method, out=None, federation=None, **settings):
        own = cross_federation if method == "fedstruct" else node_federation
        return run(
            method,
            federation or own,
            model=MODELS[method],
            out=out,
            **{"rounds": 2, **GIVEN[method], **settings},
        )

    return play


def shown(folder):
    """All tensors that are shown, by file and name."""
    files = [*(folder / "artifacts").glob("*.safetensors"), *folder.glob("artifacts.safetensors")]
    return {
        (str(path.relative_to(folder)), name): tensor
        for path in files
        for name, tensor in load_file(path).items()
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[key], other[key]) for key in one)


def by_kind(folder, kind):
    return [figure for figure in pictures(folder) if figure["kind"] == kind]


def matrix_of(panel):
    return np.frombuffer(base64.b64decode(panel["values"]), np.uint8).reshape(
        panel["size"], panel["size"]
    )


# ---- what a run leaves ----
@pytest.mark.parametrize("method", GIVEN)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_shows_what_the_loop_shows(play, method, engine, tmp_path, request):
    if engine == "ray":
        request.getfixturevalue("local_ray")
    play(method, tmp_path / "loop")
    play(method, tmp_path / engine, engine=engine)
    assert len(shown(tmp_path / "loop")) > 8
    assert_same(shown(tmp_path / "loop"), shown(tmp_path / engine))


@pytest.mark.parametrize("method", GIVEN)
def test_showing_changes_nothing_in_the_run(play, method, tmp_path, monkeypatch):
    with_pictures = play(method, tmp_path / "x")
    monkeypatch.setattr(
        Loop,
        "artifacts",
        lambda self: pytest.fail("nothing is collected for a run that is not kept"),
    )
    without_folder = play(method)
    same = ("history_hash", "traffic", "accuracy", "per_client")
    assert {k: with_pictures.summary[k] for k in same} == {
        k: without_folder.summary[k] for k in same
    }
    for name, weights in without_folder.models.items():
        kept = flatten(with_pictures.models[name])
        assert all(torch.equal(tensor, kept[key]) for key, tensor in flatten(weights).items())


@pytest.mark.parametrize("method", GIVEN)
def test_a_resumed_run_shows_the_same(play, method, tmp_path):
    def stop(entry, planned):
        if entry["round"] == 1:
            raise RuntimeError("stopped")

    settings = {"checkpoint_every": 1, "evaluate_every": 2}
    play(method, tmp_path / "whole", **settings)
    with pytest.raises(RuntimeError, match="stopped"):
        play(method, tmp_path / "x", **settings, on_round=stop)
    assert shown(tmp_path / "x") == {}  # a run that is not completed shows nothing
    assert pictures(tmp_path / "x") == []
    play(method, tmp_path / "x", **settings, resume=True)
    assert_same(shown(tmp_path / "whole"), shown(tmp_path / "x"))


def test_most_methods_show_nothing_and_leave_no_files(node_federation, tmp_path):
    run("fedavg", node_federation, model="gcn-2x8", rounds=1, out=tmp_path / "x")
    assert not list((tmp_path / "x").glob("artifacts*"))
    assert pictures(tmp_path / "x") == []


def test_parties_of_a_deployment_show_nothing(node_federation, tmp_path):
    pytest.importorskip("flwr")
    from fedloom.deploy.engine import RemoteEngine

    assert RemoteEngine.artifacts(None) == {}


def test_a_secure_run_shows_the_same_as_an_open_one(play, tmp_path):
    play("fedstruct", tmp_path / "open")
    play("fedstruct", tmp_path / "secure", secure=True)
    one, other = shown(tmp_path / "open"), shown(tmp_path / "secure")
    assert_same(one, other)


def test_pictures_are_read_without_torch(play, tmp_path):
    play("fedgh", tmp_path / "x")
    code = "import sys; from fedloom.pictures import pictures; print(len(pictures(sys.argv[1])), 'torch' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["4", "False"]


def test_ids_are_told_apart_by_a_prefix(play, tmp_path):
    play("fedstruct", tmp_path / "x")
    assert [figure["id"] for figure in pictures(tmp_path / "x", "a-")] == [
        "a-adjacency-weight",
        "a-adjacency-entries",
    ]


# ---- FedGH ----
def test_graphs_are_the_clients_own_their_pseudo_graphs_and_what_was_added(
    play, node_federation, tmp_path
):
    play("fedgh", tmp_path / "x")
    figures = by_kind(tmp_path / "x", "graph")
    assert [figure["id"] for figure in figures] == [f"graphs-{k}" for k in range(4)]
    assert all(figure["section"] == "pictures" for figure in figures)
    json.dumps(figures)
    for figure, graph in zip(figures, node_federation.graphs, strict=True):
        own, pseudo, refined = figure["panels"]
        nodes = neighbourhood(graph.edge_index, graph.num_nodes, SHOWN_NODES).tolist()
        assert sorted(nodes) == list(range(graph.num_nodes))
        edges = {tuple(sorted((nodes[i], nodes[j]))) for i, j in own["edges"]}
        assert edges == {
            tuple(sorted(pair)) for pair in graph.edge_index.T.tolist() if pair[0] != pair[1]
        }
        assert own["classes"] == graph.y[nodes].tolist()
        assert own["points"] == pseudo["points"] == refined["points"]
        assert own["edges"] == refined["edges"] != pseudo["edges"]
        assert refined["added"]
        assert not {tuple(sorted(pair)) for pair in refined["added"]} & {
            tuple(sorted(pair)) for pair in own["edges"]
        }
        assert len(own["points"]) == graph.num_nodes
        assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in own["points"])


@pytest.mark.parametrize(
    ("settings", "titles"),
    [
        ({"refine_by": "noise"}, ["its graph", "refined"]),
        ({"refine_by": "pseudo-graph"}, ["its graph", "pseudo-graph"]),
        ({"top_entries": 2}, ["its graph", "pseudo-graph", "refined"]),
        ({"embedding_width": 0}, []),
    ],
)
def test_what_a_variant_does_not_make_is_not_shown(play, settings, titles, tmp_path):
    play("fedgh", tmp_path / "x", **settings)
    for figure in by_kind(tmp_path / "x", "graph"):
        assert [panel["title"].partition(":")[0] for panel in figure["panels"]] == titles
    assert bool(by_kind(tmp_path / "x", "graph")) == bool(titles)


def test_few_clients_show_a_part_of_a_large_graph(play, tmp_path):
    graph = synthetic(nodes=3000, classes=3, features=4, degree=8.0, seed=0)
    play(
        "fedgh",
        tmp_path / "x",
        divide(graph, 6, "random", 0, split="40/30/30"),
        rounds=1,
        vgae_epochs=1,
        diffusion_epochs=1,
    )
    figures = by_kind(tmp_path / "x", "graph")
    assert len(figures) == 4
    assert all(
        len(panel["points"]) == SHOWN_NODES for figure in figures for panel in figure["panels"]
    )
    assert "Of its 480 nodes, 300" in figures[0]["caption"]
    assert sum(path.stat().st_size for path in (tmp_path / "x" / "artifacts").iterdir()) < 200_000


def test_of_many_links_fewer_nodes_are_shown():
    full = torch.combinations(torch.arange(200)).T
    assert full.shape[1] > SHOWN_LINKS
    left = room([full[:, :0], full], 200, SHOWN_LINKS)
    assert left == 84  # 200, 150, 112, 84: 84 · 83 / 2 are fewer than 4,000
    assert left * (left - 1) / 2 <= SHOWN_LINKS < 112 * 111 / 2


def test_a_neighbourhood_grows_from_the_best_connected_node():
    star = torch.tensor([[5, 5, 5, 0], [6, 7, 8, 1]])
    assert neighbourhood(star, 10, 3).tolist()[0] == 5
    assert set(neighbourhood(star, 10, 4).tolist()) == {5, 6, 7, 8}
    assert sorted(neighbourhood(star, 10, 50).tolist()) == list(range(10))
    assert neighbourhood(star[:, :0], 2, 5).tolist() == [0, 1]
    assert between(star, torch.tensor([8, 5, 0]), 10).tolist() == [[1], [0]]


def test_a_layout_parts_what_is_not_connected_and_is_the_same_every_time():
    ring = [[k, (k + 1) % 8] for k in range(8)]
    links = [*ring, [8, 9], [10, 11], [11, 12]]
    points = layout(15, links)
    assert points.shape == (15, 2)
    assert np.array_equal(points, layout(15, links))
    assert points.min() >= 0
    assert points.max() <= 1
    apart = np.linalg.norm(points[:, None] - points[None], axis=2) + np.eye(15)
    assert apart.min() > 0.02
    boxes = [points[part] for part in (range(8), range(8, 10), range(10, 13), [13], [14])]
    for one in boxes:
        for other in boxes:
            if one is not other:  # no two parts overlap
                assert (one.max(0) < other.min(0)).any() or (other.max(0) < one.min(0)).any()
    assert layout(0, []).shape == (0, 2)
    assert layout(1, []).tolist() == [[0.5, 0.5]]
    assert np.isfinite(layout(4, [[a, b] for a in range(4) for b in range(a)])).all()


# ---- FedStruct ----
def dense(federation, beta):
    """Ā of the whole graph in the order of clients, by plain matrix powers."""
    graph, order = federation.whole, torch.cat([g.node_id for g in federation.graphs]).numpy()
    A = np.eye(graph.num_nodes)
    for source, target in graph.edge_index.T.tolist():
        A[target, source] += source != target
    A = (A / A.sum(1, keepdims=True))[np.ix_(order, order)]
    return sum(b * np.linalg.matrix_power(A, hop) for hop, b in enumerate(beta))


def in_cells(matrix, side):
    cell = np.arange(len(matrix)) * side // len(matrix)
    out = np.zeros((side, side))
    np.add.at(out, (cell[:, None], cell[None]), matrix)
    return out


def left(folder, kind, n):
    """What the clients' rows add up to."""
    total = np.zeros((binned.count(n), binned.count(n)))
    for path in (folder / "artifacts").iterdir():
        tensors = load_file(path)
        first, part = int(tensors["adjacency/first"]), tensors[f"adjacency/{kind}"]
        total[first : first + len(part)] += part
    return total


@pytest.mark.parametrize("side", [256, 17])
@pytest.mark.parametrize(
    "settings", [{}, {"beta": "0.5,0,0.25,0.25"}, {"private": True, "query_limit": 10**6}]
)
def test_unpruned_before_and_after_are_the_dense_matrix(
    play, cross_federation, side, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr(binned, "MOST_CELLS", side)
    play("fedstruct", tmp_path / "x", prune="none", **settings)
    beta = [float(b) for b in settings.get("beta", "0,0,0,1").split(",")]
    exact = dense(cross_federation, beta)
    of_all = load_file(tmp_path / "x" / "artifacts.safetensors")
    side = min(side, 211)
    for kind, matrix in (("weight", exact), ("entries", exact > 0)):
        wanted = in_cells(matrix, side)
        before = of_all[f"adjacency/{kind}"].reshape(side, side)
        assert before == pytest.approx(wanted, rel=1e-5)
        assert left(tmp_path / "x", kind, 211) == pytest.approx(wanted, rel=1e-5)
    for figure in by_kind(tmp_path / "x", "image"):
        one, other = (matrix_of(panel).astype(int) for panel in figure["panels"])
        assert abs(one - other).max() <= 1
        assert one.max() == 255
        assert [panel["title"].partition(" pruning: ")[::2] for panel in figure["panels"]] == [
            ("before", said := figure["panels"][0]["title"].partition(": ")[2]), ("after", said),
        ]  # fmt: skip


@pytest.mark.parametrize("prune", ["protocol", "global"])
def test_pruning_leaves_less(play, prune, tmp_path):
    result = play("fedstruct", tmp_path / "x", prune=prune, p=2)
    of_all = load_file(tmp_path / "x" / "artifacts.safetensors")
    entries, weight = left(tmp_path / "x", "entries", 211), left(tmp_path / "x", "weight", 211)
    assert entries.sum() == result.summary["notes"]["entries of the structure matrix"]
    assert (entries <= of_all["adjacency/entries"]).all()
    assert (weight <= of_all["adjacency/weight"][0] + 1e-6).all()
    assert entries.sum() < 0.5 * of_all["adjacency/entries"].sum()
    figure = by_kind(tmp_path / "x", "image")[1]
    before, after = map(matrix_of, figure["panels"])
    assert ((before > 0) == (of_all["adjacency/entries"] > 0)).all()
    assert ((after > 0) == (entries > 0)).all()
    assert figure["ticks"] == (of_all["adjacency/starts"][:-1] / 211).round(6).tolist()


def test_a_learned_filter_is_the_one_that_the_run_ended_with(play, cross_federation, tmp_path):
    result = play("fedstruct", tmp_path / "x", prune="none", learn_beta=True, lr=0.1)
    beta = result.models["server"]["beta"].tolist()
    assert beta != [0, 0, 0, 1]
    wanted = dense(cross_federation, beta)
    assert left(tmp_path / "x", "weight", 211) == pytest.approx(wanted, abs=1e-5)
    before, after = (
        matrix_of(panel).astype(int) for panel in by_kind(tmp_path / "x", "image")[0]["panels"]
    )
    assert abs(before - after).max() <= 1


def test_behind_fedgh_the_exact_matrix_is_shown_only_if_edges_stay(
    play, cross_federation, tmp_path
):
    small = {**SMALL, **STRUCT, "base": "fedstruct"}
    for out, more, panels in (("kept", {"add_edges": 0}, 2), ("changed", {}, 1)):
        run(
            "fedgh",
            cross_federation,
            model="dgcn-2x8",
            rounds=1,
            out=tmp_path / out,
            **{**small, **more},
        )
        assert [len(figure["panels"]) for figure in by_kind(tmp_path / out, "image")] == [
            panels,
            panels,
        ]
        assert len(by_kind(tmp_path / out, "graph")) == 4
    assert "not known" in by_kind(tmp_path / "changed", "image")[0]["caption"]


def test_what_would_take_too_long_is_not_worked_out(play, tmp_path, monkeypatch):
    monkeypatch.setattr(binned, "WORK", 1)
    monkeypatch.setattr(binned, "REACH_WORK", 1)
    play("fedstruct", tmp_path / "x")
    assert load_file(tmp_path / "x" / "artifacts.safetensors").keys() == {"adjacency/starts"}
    assert [len(figure["panels"]) for figure in by_kind(tmp_path / "x", "image")] == [1, 1]


@pytest.mark.parametrize("n", [1, 5, 255, 256, 257, 700])
def test_cells_against_dense_powers(n, monkeypatch):
    monkeypatch.setattr(binned, "REACHED_BYTES", 2**14)  # several blocks of columns
    matrix = csr_matrix(
        random_array((n, n), density=min(1.0, 3 / n), rng=n) + csr_matrix(np.eye(n))
    )
    full, side = matrix.toarray(), binned.count(n)
    assert np.diff(binned.begins(n)).min() >= 1
    assert [binned.cell(int(first), n) for first in binned.begins(n)[:-1]] == list(range(side))
    powers = binned.of_powers(matrix, 3)
    for hop in range(4):
        exact = np.linalg.matrix_power(full, hop)
        assert powers[hop] == pytest.approx(in_cells(exact, side), rel=1e-9)
        assert np.array_equal(binned.of_reach(matrix, hop), in_cells(exact != 0, side))
    start, stop = n // 3, max(n // 3 + 1, 2 * n // 3)
    sums, counts = binned.of_rows(csr_matrix(matrix[start:stop]), np.arange(n), start, n)
    alone = np.zeros((n, n))
    alone[start:stop] = full[start:stop]
    first = binned.cell(start, n)
    assert sums == pytest.approx(in_cells(alone, side)[first : first + len(sums)])
    assert np.array_equal(counts, in_cells(alone != 0, side)[first : first + len(sums)])
    assert sums.sum() == pytest.approx(alone.sum())


def test_exhibits_of_a_large_graph_are_small(play, tmp_path):
    graph = synthetic(nodes=3000, classes=3, features=4, degree=6.0, seed=0)
    play(
        "fedstruct",
        tmp_path / "x",
        divide(graph, 5, "random", 0, split="40/30/30", cross_edges="known"),
        rounds=1,
    )
    assert (tmp_path / "x" / "artifacts.safetensors").stat().st_size < 2 * 4 * 256**2 + 2000
    assert (
        sum(path.stat().st_size for path in (tmp_path / "x" / "artifacts").iterdir())
        < 2 * 4 * 256 * (256 + 5) + 5 * 2000
    )


# ---- damaged folders ----
def test_damaged_exhibits_are_named(play, tmp_path):
    play("fedgh", tmp_path / "x")
    path = tmp_path / "x" / "artifacts" / "1.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"1\.safetensors' is damaged"):
        pictures(tmp_path / "x")
    save_file({"graphs/labels": np.zeros(3, np.int64)}, path)
    with pytest.raises(DataError, match=r"is damaged \(artifacts: KeyError"):
        pictures(tmp_path / "x")
    path.write_bytes(whole)
    for content in ("{", "[]"):
        (tmp_path / "x" / "embeddings.json").write_text(content)
        with pytest.raises(DataError, match=r"embeddings\.json' is damaged"):
            pictures(tmp_path / "x")


# ---- embeddings ----
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of a short run that has learned something."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    make_recipe(SYNTHETIC).execute(folder)
    return folder


@pytest.mark.parametrize("how", ["pca", "tsne"])
def test_embeddings_show_the_classes_and_are_kept(trained, how):
    figure = embed(trained, how=how)
    (panel,) = figure["panels"]
    assert len(panel["points"]) == 300
    assert set(panel["classes"]) == set(panel["clients"]) == {0, 1, 2}
    points = np.array(panel["points"])
    assert points.min() >= 0
    assert points.max() <= 1
    shuffled = np.random.default_rng(0).permutation(panel["classes"])
    assert (
        silhouette_score(points, panel["classes"]) > 0.1 > 0.02 > silhouette_score(points, shuffled)
    )
    assert pictures(trained) == [figure]
    assert embed(trained, how=how) == figure


def test_embeddings_are_what_the_models_give(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fedloom.experiments.embeddings.reduced",
        lambda rows, how: seen.append(rows) or reduced(rows, how),
    )
    embed(trained, clients=["1"], how="pca")
    recipe = make_recipe(SYNTHETIC)
    result = recipe.execute()
    graph = recipe.federation().graphs[1]
    net = build_model("gcn-2x8", 16, 3, seed=0)
    load_weights(net, result.models["1"])
    with torch.no_grad():
        assert np.array_equal(seen[0], net.embed(graph).numpy())


def test_clients_and_number_of_points_can_be_chosen(trained):
    figure = embed(trained, clients=["2", "0"], most=40, how="pca")
    assert len(figure["panels"][0]["clients"]) == 40
    assert set(figure["panels"][0]["clients"]) == {0, 1}
    assert figure["client_names"] == ["2", "0"]


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ({"name": "fedgh", **SMALL}, "just before"),
        ({"name": "fedstruct", **STRUCT}, "class scores"),
        ({"name": "fedsgd"}, "just before"),
        ({"name": "fedsage+"}, "just before"),
        ({"name": "fednh"}, "just before"),
        ({"name": "central"}, "just before"),
    ],
)
def test_methods_that_change_graphs_or_models_have_embeddings_too(method, what, tmp_path):
    tables = {**SYNTHETIC, "method": {**method, "rounds": 2}}
    make_recipe(tables).execute(tmp_path / "x")
    figure = embed(tmp_path / "x", how="pca")
    assert what in figure["caption"]
    assert len(figure["panels"][0]["points"]) == 300


def test_graphs_of_a_graph_task_have_embeddings(tmp_path):
    tables = {
        "data": {"dataset": "synthetic-graphs:graphs=60,classes=2", "split": "50/20/30"}, "partition": {"name": "uniform", "clients": 3},
        "model": {"name": "gin-2x8"}, "method": {"name": "fedavg", "rounds": 1},
    }  # fmt: skip
    make_recipe(tables).execute(tmp_path / "x")
    assert len(embed(tmp_path / "x", how="pca")["panels"][0]["points"]) == 60


def test_few_rows_and_narrow_ones_have_two_dimensions_too():
    rows = np.random.default_rng(0).normal(size=(5, 1)).astype(np.float32)
    for how in ("pca", "tsne"):
        assert reduced(rows, how).shape == (5, 2)
        assert np.isfinite(reduced(np.zeros((6, 3), np.float32), how)).all()


def test_what_cannot_be_embedded_says_why(trained, node_federation, tmp_path):
    with pytest.raises(ConfigError, match="Valid: pca, tsne"):
        embed(trained, how="umap")
    with pytest.raises(ConfigError, match="most is 2, must be at least 3"):
        embed(trained, most=2)
    with pytest.raises(ConfigError, match=r"unknown client '7'.*Valid: 0, 1, 2"):
        embed(trained, clients=["7"])
    with pytest.raises(DataError, match="is not a run folder"):
        embed(tmp_path / "nothing")
    run("fedavg", node_federation, model="gcn-2x8", rounds=1, out=tmp_path / "python")
    with pytest.raises(DataError, match="given from Python"):
        embed(tmp_path / "python")
    make_recipe({**SYNTHETIC, "method": {"name": "fedavg", "rounds": 1}}).execute(tmp_path / "bare")
    for path in (tmp_path / "bare" / "models").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="has no models"):
        embed(tmp_path / "bare")
    (tmp_path / "bare" / "summary.json").unlink()
    with pytest.raises(DataError, match="is unfinished"):
        embed(tmp_path / "bare")


def test_models_that_are_not_enough_say_so(tmp_path):
    private = {"name": "fedstruct", **STRUCT, "rounds": 1, "private": True, "query_limit": 10**6}
    make_recipe({**SYNTHETIC, "method": private}).execute(tmp_path / "x")
    with pytest.raises(DataError, match="models alone do not bring back"):
        embed(tmp_path / "x")
    make_recipe(
        {
            **SYNTHETIC,
            "model": {"name": "gcn-2x8,gcn-2x16"},
            "method": {"name": "local", "rounds": 1},
        }
    ).execute(tmp_path / "y")
    with pytest.raises(DataError, match="differ in width"):
        embed(tmp_path / "y")
    assert embed(tmp_path / "y", clients=["1"], how="pca")["kind"] == "scatter"
