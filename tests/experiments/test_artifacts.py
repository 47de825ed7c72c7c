"""Artifacts that clients leave after a run, the pictures made from them, and embeddings in 2-D.

Artifacts are compared between engines, after a resume, and with dense matrices.
"""

import base64
import json
import shutil
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
from fedloom.methods._shared import cells
from fedloom.methods.fedgh import SHOWN_LINKS, SHOWN_NODES, between, neighbourhood, room
from fedloom.nn.build import build_model
from fedloom.nn.weights import load_weights

STRUCT = {"hops": 3, "p": 4, "d_s": 8, "hidden": "6"}
GIVEN = {"fedgh": {**SMALL, "epochs": 1}, "fedstruct": STRUCT}
MODELS = {"fedgh": "gcn-2x8", "fedstruct": "dgcn-2x8"}
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
def run_method(node_federation, cross_federation):
    """Returns a function that runs a method for two rounds on a small federation."""

    def run_method(method, out=None, federation=None, **settings):
        own = cross_federation if method == "fedstruct" else node_federation
        return run(
            method,
            federation or own,
            model=MODELS[method],
            out=out,
            **{"rounds": 2, **GIVEN[method], **settings},
        )

    return run_method


@pytest.fixture(scope="module")
def finished(tmp_path_factory, node_federation, cross_federation):
    """Finished runs of both methods with their default settings: {method: (folder, result)}."""
    found = {}
    for method, federation in (("fedgh", node_federation), ("fedstruct", cross_federation)):
        folder = tmp_path_factory.mktemp(method) / "x"
        settings = {"rounds": 2, **GIVEN[method]}
        found[method] = (
            folder,
            run(method, federation, model=MODELS[method], out=folder, **settings),
        )
    return found


def shown(folder):
    """All tensors of the artifacts, by file and name."""
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


# ---- artifacts of a run ----
SLOW_ENGINES = [
    pytest.param(engine, marks=pytest.mark.slow)
    for engine in ("processes", "stacked_processes", "ray")
]


@pytest.mark.parametrize("method", GIVEN)
@pytest.mark.parametrize("engine", ["stacked", "wire", *SLOW_ENGINES])
def test_every_engine_leaves_the_artifacts_of_the_loop(
    finished, run_method, method, engine, tmp_path, request
):
    if engine == "ray":
        request.getfixturevalue("local_ray")
    loop, _ = finished[method]
    run_method(method, tmp_path / engine, engine=engine)
    assert len(shown(loop)) > 8
    assert_same(shown(loop), shown(tmp_path / engine))


@pytest.mark.parametrize("method", GIVEN)
def test_artifacts_do_not_change_the_run(finished, run_method, method, monkeypatch):
    _, with_artifacts = finished[method]
    message = "a run without a folder must not collect artifacts"
    monkeypatch.setattr(Loop, "artifacts", lambda self: pytest.fail(message))
    without_folder = run_method(method)
    same = ("history_hash", "traffic", "accuracy", "per_client")
    assert {k: with_artifacts.summary[k] for k in same} == {
        k: without_folder.summary[k] for k in same
    }
    for name, weights in without_folder.final_models.items():
        expected = flatten(with_artifacts.final_models[name])
        assert all(torch.equal(tensor, expected[key]) for key, tensor in flatten(weights).items())


@pytest.mark.slow
@pytest.mark.parametrize("method", GIVEN)
def test_a_resumed_run_leaves_the_same_artifacts(run_method, method, tmp_path):
    def stop(entry):
        if entry["round"] == 1:
            raise RuntimeError("stopped")

    settings = {"checkpoint_every": 1, "evaluate_every": 2}
    run_method(method, tmp_path / "whole", **settings)
    with pytest.raises(RuntimeError, match="stopped"):
        run_method(method, tmp_path / "x", **settings, callbacks=stop)
    assert shown(tmp_path / "x") == {}  # an unfinished run has no artifacts
    assert pictures(tmp_path / "x") == []
    run_method(method, tmp_path / "x", **settings, resume=True)
    assert_same(shown(tmp_path / "whole"), shown(tmp_path / "x"))


def test_most_methods_leave_no_artifacts(node_federation, tmp_path):
    run("fedavg", node_federation, model="gcn-2x8", rounds=1, out=tmp_path / "x")
    assert not list((tmp_path / "x").glob("artifacts*"))
    assert pictures(tmp_path / "x") == []


@pytest.mark.slow
def test_parties_of_a_deployment_leave_no_artifacts(node_federation, tmp_path):
    pytest.importorskip("flwr")
    from fedloom.deploy.engine import RemoteEngine

    assert RemoteEngine.artifacts(None) == {}


def test_a_secure_run_leaves_the_artifacts_of_a_plain_one(finished, run_method, tmp_path):
    run_method("fedstruct", tmp_path / "secure", secure=True)
    assert_same(shown(finished["fedstruct"][0]), shown(tmp_path / "secure"))


def test_pictures_are_made_without_torch(finished):
    code = (
        "import sys; from fedloom.experiments.report.artifacts import pictures; "
        "print(len(pictures(sys.argv[1])), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(finished["fedgh"][0])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["4", "False"]


def test_ids_start_with_the_prefix(finished):
    assert [figure["id"] for figure in pictures(finished["fedstruct"][0], "a-")] == [
        "a-adjacency-weight",
        "a-adjacency-entries",
    ]


# ---- FedGH ----
def test_graphs_show_the_original_the_pseudo_and_the_refined_graph(finished, node_federation):
    figures = by_kind(finished["fedgh"][0], "graph")
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
        ({"refine_by": "noise"}, ["original graph", "refined graph"]),
        ({"refine_by": "pseudo-graph"}, ["original graph", "pseudo-graph"]),
        ({"top_entries": 2}, ["original graph", "pseudo-graph", "refined graph"]),
        ({"embedding_width": 0}, []),
    ],
)
def test_pictures_show_only_the_graphs_that_a_variant_makes(run_method, settings, titles, tmp_path):
    run_method("fedgh", tmp_path / "x", **settings)
    for figure in by_kind(tmp_path / "x", "graph"):
        assert [panel["title"].partition(":")[0] for panel in figure["panels"]] == titles
    assert bool(by_kind(tmp_path / "x", "graph")) == bool(titles)


@pytest.mark.slow
def test_only_some_clients_show_a_part_of_a_large_graph(run_method, tmp_path):
    graph = synthetic(nodes=3000, classes=3, features=4, degree=8.0, seed=0)
    run_method(
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
    assert "The picture shows 300 neighbouring nodes of 480." in figures[0]["caption"]
    assert sum(path.stat().st_size for path in (tmp_path / "x" / "artifacts").iterdir()) < 200_000


def test_dense_graphs_show_fewer_nodes():
    full = torch.combinations(torch.arange(200)).T
    assert full.shape[1] > SHOWN_LINKS
    left = room([full[:, :0], full], 200, SHOWN_LINKS)
    assert left == 84  # 200, 150, 112, 84: 84 · 83 / 2 is less than 4,000
    assert left * (left - 1) / 2 <= SHOWN_LINKS < 112 * 111 / 2


def test_a_neighbourhood_starts_at_the_node_with_the_highest_degree():
    star = torch.tensor([[5, 5, 5, 0], [6, 7, 8, 1]])
    assert neighbourhood(star, 10, 3).tolist()[0] == 5
    assert set(neighbourhood(star, 10, 4).tolist()) == {5, 6, 7, 8}
    assert sorted(neighbourhood(star, 10, 50).tolist()) == list(range(10))
    assert neighbourhood(star[:, :0], 2, 5).tolist() == [0, 1]
    assert between(star, torch.tensor([8, 5, 0]), 10).tolist() == [[1], [0]]


def test_a_layout_separates_components_and_is_deterministic():
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
            if one is not other:  # components do not overlap
                assert (one.max(0) < other.min(0)).any() or (other.max(0) < one.min(0)).any()
    assert layout(0, []).shape == (0, 2)
    assert layout(1, []).tolist() == [[0.5, 0.5]]
    assert np.isfinite(layout(4, [[a, b] for a in range(4) for b in range(a)])).all()


# ---- FedStruct ----
def dense(federation, beta):
    """Returns Ā of the whole graph in the order of clients, computed by dense matrix powers."""
    graph, order = federation.whole, torch.cat([g.node_id for g in federation.graphs]).numpy()
    A = np.eye(graph.num_nodes)
    for source, target in graph.edge_index.T.tolist():
        A[target, source] += source != target
    A = (A / A.sum(1, keepdims=True))[np.ix_(order, order)]
    return sum(b * np.linalg.matrix_power(A, hop) for hop, b in enumerate(beta))


def in_cells(matrix, side):
    """Returns the sums of a matrix's entries over side x side cells."""
    cell = np.arange(len(matrix)) * side // len(matrix)
    out = np.zeros((side, side))
    np.add.at(out, (cell[:, None], cell[None]), matrix)
    return out


def pruned(folder, kind, n):
    """Returns the sum of the clients' rows of the pruned matrix."""
    total = np.zeros((cells.count(n), cells.count(n)))
    for path in (folder / "artifacts").iterdir():
        tensors = load_file(path)
        first, part = int(tensors["adjacency/first"]), tensors[f"adjacency/{kind}"]
        total[first : first + len(part)] += part
    return total


@pytest.mark.parametrize("side", [256, 17])
@pytest.mark.parametrize(
    "settings", [{}, {"beta": "0.5,0,0.25,0.25"}, {"private": True, "query_limit": 10**6}]
)
def test_without_pruning_both_matrices_equal_the_dense_one(
    run_method, cross_federation, side, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr(cells, "MOST_CELLS", side)
    run_method("fedstruct", tmp_path / "x", prune="none", **settings)
    beta = [float(b) for b in settings.get("beta", "0,0,0,1").split(",")]
    exact = dense(cross_federation, beta)
    of_all = load_file(tmp_path / "x" / "artifacts.safetensors")
    side = min(side, 211)
    for kind, matrix in (("weight", exact), ("entries", exact > 0)):
        wanted = in_cells(matrix, side)
        before = of_all[f"adjacency/{kind}"].reshape(side, side)
        np.testing.assert_allclose(before, wanted, rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(pruned(tmp_path / "x", kind, 211), wanted, rtol=1e-5, atol=1e-12)
    for figure in by_kind(tmp_path / "x", "image"):
        one, other = (matrix_of(panel).astype(int) for panel in figure["panels"])
        assert abs(one - other).max() <= 1
        assert one.max() == 255
        text = figure["panels"][0]["title"].partition(": ")[2]
        assert [panel["title"] for panel in figure["panels"]] == [
            f"before pruning: {text}",
            f"after pruning: {text}",
        ]


@pytest.mark.parametrize("prune", ["protocol", "global"])
def test_pruning_removes_entries_and_weight(run_method, prune, tmp_path):
    result = run_method("fedstruct", tmp_path / "x", prune=prune, p=2)
    of_all = load_file(tmp_path / "x" / "artifacts.safetensors")
    entries, weight = (pruned(tmp_path / "x", kind, 211) for kind in ("entries", "weight"))
    assert entries.sum() == result.summary["notes"]["entries of the structure matrix"]
    assert (entries <= of_all["adjacency/entries"]).all()
    assert (weight <= of_all["adjacency/weight"][0] + 1e-6).all()
    assert entries.sum() < 0.5 * of_all["adjacency/entries"].sum()
    figure = by_kind(tmp_path / "x", "image")[1]
    before, after = map(matrix_of, figure["panels"])
    assert ((before > 0) == (of_all["adjacency/entries"] > 0)).all()
    assert ((after > 0) == (entries > 0)).all()
    assert figure["ticks"] == (of_all["adjacency/starts"][:-1] / 211).round(6).tolist()


def test_a_learned_filter_is_that_of_the_final_model(run_method, cross_federation, tmp_path):
    result = run_method("fedstruct", tmp_path / "x", prune="none", learn_beta=True, lr=0.1)
    beta = result.final_models["server"]["beta"].tolist()
    assert beta != [0, 0, 0, 1]
    wanted = dense(cross_federation, beta)
    np.testing.assert_allclose(pruned(tmp_path / "x", "weight", 211), wanted, rtol=0, atol=1e-5)
    before, after = (
        matrix_of(panel).astype(int) for panel in by_kind(tmp_path / "x", "image")[0]["panels"]
    )
    assert abs(before - after).max() <= 1


def test_behind_fedgh_the_exact_matrix_is_known_only_if_the_graph_is_unchanged(
    cross_federation, tmp_path
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


def test_exact_matrices_that_take_too_long_are_left_out(run_method, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "WORK", 1)
    monkeypatch.setattr(cells, "REACH_WORK", 1)
    run_method("fedstruct", tmp_path / "x")
    assert load_file(tmp_path / "x" / "artifacts.safetensors").keys() == {"adjacency/starts"}
    assert [len(figure["panels"]) for figure in by_kind(tmp_path / "x", "image")] == [1, 1]


@pytest.mark.parametrize("n", [1, 5, 255, 256, 257, 700])
def test_cells_agree_with_dense_powers(n, monkeypatch):
    monkeypatch.setattr(cells, "REACHED_BYTES", 2**14)  # several blocks of columns
    matrix = csr_matrix(
        random_array((n, n), density=min(1.0, 3 / n), rng=n) + csr_matrix(np.eye(n))
    )
    full, side = matrix.toarray(), cells.count(n)
    assert np.diff(cells.begins(n)).min() >= 1
    assert [cells.cell(int(first), n) for first in cells.begins(n)[:-1]] == list(range(side))
    powers = cells.of_powers(matrix, 3)
    for hop in range(4):
        exact = np.linalg.matrix_power(full, hop)
        np.testing.assert_allclose(powers[hop], in_cells(exact, side), rtol=1e-9, atol=1e-12)
        assert np.array_equal(cells.of_reach(matrix, hop), in_cells(exact != 0, side))
    start, stop = n // 3, max(n // 3 + 1, 2 * n // 3)
    sums, counts = cells.of_rows(csr_matrix(matrix[start:stop]), np.arange(n), start, n)
    rows = np.zeros((n, n))
    rows[start:stop] = full[start:stop]
    first = cells.cell(start, n)
    np.testing.assert_allclose(
        sums, in_cells(rows, side)[first : first + len(sums)], rtol=1e-6, atol=1e-12
    )
    assert np.array_equal(counts, in_cells(rows != 0, side)[first : first + len(sums)])
    assert sums.sum() == pytest.approx(rows.sum())


def test_artifacts_of_a_large_graph_are_small(run_method, tmp_path):
    graph = synthetic(nodes=3000, classes=3, features=4, degree=6.0, seed=0)
    run_method(
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
def test_errors_name_damaged_artifacts(finished, tmp_path):
    shutil.copytree(finished["fedgh"][0], tmp_path / "x")
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
    """The folder of a short run whose models have learned the classes."""
    folder = tmp_path_factory.mktemp("runs") / "x"
    make_recipe(SYNTHETIC).execute(folder)
    return folder


@pytest.mark.parametrize("how", ["pca", "tsne"])
def test_embeddings_separate_the_classes_and_are_stored(trained, how):
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


def test_embeddings_are_those_of_the_models(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fedloom.experiments.embeddings.reduced",
        lambda rows, how: seen.append(rows) or reduced(rows, how),
    )
    embed(trained, clients=["1"], how="pca")
    recipe = make_recipe(SYNTHETIC)
    result = recipe.execute()
    graph = recipe.federation().graphs[1]
    model = build_model("gcn-2x8", 16, 3, seed=0)
    load_weights(model, result.models["1"])
    with torch.no_grad():
        assert np.array_equal(seen[0], model.embed(graph).numpy())


def test_embeddings_can_be_limited_to_clients_and_points(trained):
    figure = embed(trained, clients=["2", "0"], most=40, how="pca")
    assert len(figure["panels"][0]["clients"]) == 40
    assert set(figure["panels"][0]["clients"]) == {0, 1}
    assert figure["client_names"] == ["2", "0"]


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ({"name": "fedgh", **SMALL}, "class scores"),
        ({"name": "fedstruct", **STRUCT}, "class scores"),
        (
            {"name": "fedstruct", **STRUCT, "private": True, "query_limit": 10**6},
            "class scores",
        ),
        ({"name": "fedsgd"}, "just before"),
        pytest.param({"name": "fedsage+"}, "just before", marks=pytest.mark.slow),
        ({"name": "fednh"}, "just before"),
        ({"name": "central"}, "just before"),
    ],
)
def test_methods_that_change_graphs_or_models_have_embeddings(method, what, tmp_path):
    tables = {**SYNTHETIC, "method": {**method, "rounds": 2}}
    make_recipe(tables).execute(tmp_path / "x")
    figure = embed(tmp_path / "x", how="pca")
    assert what in figure["caption"]
    assert len(figure["panels"][0]["points"]) == 300


def test_graphs_of_a_graph_task_have_embeddings(tmp_path):
    tables = {
        "data": {"dataset": "synthetic-graphs:graphs=60,classes=2", "split": "50/20/30"},
        "partition": {"name": "uniform", "clients": 3},
        "model": {"name": "gin-2x8"},
        "method": {"name": "fedavg", "rounds": 1},
    }
    make_recipe(tables).execute(tmp_path / "x")
    assert len(embed(tmp_path / "x", how="pca")["panels"][0]["points"]) == 60


def test_few_and_narrow_rows_are_reduced_to_two_dimensions():
    rows = np.random.default_rng(0).normal(size=(5, 1)).astype(np.float32)
    for how in ("pca", "tsne"):
        assert reduced(rows, how).shape == (5, 2)
        assert np.isfinite(reduced(np.zeros((6, 3), np.float32), how)).all()


def test_errors_say_why_there_are_no_embeddings(trained, node_federation, tmp_path):
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
    shutil.rmtree(tmp_path / "bare" / "models")
    with pytest.raises(DataError, match="has no best models"):
        embed(tmp_path / "bare")
    (tmp_path / "bare" / "summary.json").unlink()
    with pytest.raises(DataError, match="is unfinished"):
        embed(tmp_path / "bare")


def test_models_of_different_widths_have_no_common_embeddings(tmp_path):
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
