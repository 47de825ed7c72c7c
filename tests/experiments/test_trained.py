"""Models after a run: which round they are of, what they take and give, and their files.

`tests/test_contract.py` checks for every method that they predict what was scored.
"""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_geometric.data import Batch, Data, HeteroData

import fedloom
from fedloom.core.message import flatten
from fedloom.data.files import to_folder
from fedloom.data.synthetic import synthetic, synthetic_graphs
from fedloom.engines import has_workers
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.history import History
from fedloom.experiments.predict_command import predict
from fedloom.experiments.predictions import predictions_of
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.result import load_run
from fedloom.experiments.run import run
from fedloom.experiments.trained import METADATA, load_model, read_model

QUICK = {"model": "gcn-2x8", "rounds": 6, "seed": 5}
FEATURES = tuple(f"f{k}" for k in range(12))
CLASSES = ("ok", "odd", "fraud")


@pytest.fixture(scope="module")
def named():
    """Two parties whose nodes, classes and features have names."""
    graph = synthetic(nodes=90, classes=3, features=12, degree=5.0, seed=1)
    parts = fedloom.divide(graph, 2, "random", 0, split="40/30/30")
    graphs = tuple(
        replace(
            g,
            ids=np.array([f"{name}-{n}" for n in g.node_id.tolist()]),
            class_names=CLASSES,
            feature_names=FEATURES,
        )
        for name, g in zip(("east", "west"), parts.graphs, strict=True)
    )
    return fedloom.Federation(graphs, ("east", "west"))


@pytest.fixture(scope="module")
def result(named):
    return run("fedavg", named, **QUICK)


@pytest.fixture(scope="module")
def new():
    return synthetic(nodes=31, classes=3, features=12, degree=4.0, seed=7)


def accuracies(result):
    """The accuracy on test items that each client's kept model has."""
    found = {}
    for name, graph in result.own_graphs().items():
        numbers = torch.from_numpy(result.predict(client=name).numbers)
        found[name] = (numbers == graph.y)[graph.test].float().mean().item()
    return found


def reported(result):
    return {row["id"]: pytest.approx(row["accuracy"], abs=1e-6) for row in result.per_client}


# ---- which round ----
def test_the_models_are_of_the_best_round_and_the_final_ones_of_the_last(graph_federation):
    result = run("fedavg", graph_federation, **QUICK)
    best = result.summary["best_round"]
    assert best < result.summary["rounds"]
    shorter = run("fedavg", graph_federation, **{**QUICK, "rounds": best})
    for owner, model in result.models.items():
        now, then = flatten(result.final_models[owner]), flatten(shorter.final_models[owner])
        assert all(torch.equal(t, then[name]) for name, t in flatten(model).items())
        assert not all(torch.equal(t, now[name]) for name, t in flatten(model).items())
    assert accuracies(result) == reported(result)
    assert {stored.card.round for stored in result.best.values()} == {best}


@pytest.mark.parametrize("method", ["fedavg", "fedsgd", "fednh"])
@pytest.mark.parametrize("engine", ["loop", "wire", "stacked", "processes", "stacked_processes"])
def test_every_engine_keeps_the_models_that_were_scored(method, engine, graph_federation):
    workers = {"workers": 2} if has_workers(engine) else {}
    result = run(method, graph_federation, engine=engine, **workers, **QUICK)
    assert result.summary["best_round"] < result.summary["rounds"]
    assert accuracies(result) == reported(result)


@pytest.mark.usefixtures("local_ray")
def test_the_ray_engine_keeps_them_too(graph_federation):
    result = run("fedavg", graph_federation, engine="ray", workers=2, **QUICK)
    assert result.summary["best_round"] < result.summary["rounds"]
    assert accuracies(result) == reported(result)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("evaluation", ["local", "global"])
def test_the_flower_engine_keeps_them_too(evaluation, graph_federation):
    chosen = {**QUICK, "evaluation": evaluation}
    result = run("fedavg", graph_federation, engine="flower", **chosen)
    assert result.summary["best_round"] < result.summary["rounds"]
    assert accuracies(result) == reported(result)


@pytest.mark.parametrize("settings", [{}, {"evaluation": "global"}, {"secure": True}])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_has_the_best_models_of_before(settings, stop, graph_federation, tmp_path):
    class StoppedError(Exception):
        """Ends a run."""

    def end(entry):
        if entry["round"] == stop + 1:
            raise StoppedError

    chosen = {**QUICK, **settings}
    whole = run("fedavg", graph_federation, **chosen)
    given = {"checkpoint_every": stop, **chosen}
    with pytest.raises(StoppedError):
        run("fedavg", graph_federation, out=tmp_path / "x", callbacks=end, **given)
    again = run("fedavg", graph_federation, out=tmp_path / "x", resume=True, **given)
    assert again.summary["history_hash"] == whole.summary["history_hash"]
    for one, other in (
        (whole.models, again.models),
        (whole.models, load_run(tmp_path / "x").models),
    ):
        one, other = flatten(one), flatten(other)
        assert one.keys() == other.keys()
        assert all(torch.equal(t, other[name]) for name, t in one.items())


def test_fine_tuned_models_are_those_of_the_best_epoch_of_fine_tuning(node_federation):
    result = run("fedavg", node_federation, finetune=4, **QUICK)
    assert {stored.card.stage for stored in result.best.values()} == {"finetune"}
    assert accuracies(result) == reported(result)


def test_without_validation_items_the_last_models_are_the_best(node_federation):
    graphs = tuple(replace(g, val=torch.zeros_like(g.val)) for g in node_federation.graphs)
    result = run("fedavg", replace(node_federation, graphs=graphs), **QUICK)
    assert accuracies(result) == reported(result)
    one, other = flatten(result.models), flatten(result.final_models)
    assert all(torch.equal(t, other[name]) for name, t in one.items())


def test_the_history_knows_which_evaluation_leads():
    history = History(None, 0)

    def entry(validation, stage="train"):
        return {"round": 1, "stage": stage, "accuracy": 0.5, "val_accuracy": validation}

    for validation, leads in ((0.5, True), (0.5, False), (0.4, False), (0.6, True)):
        assert history.leads(entry(validation)) is leads
        history.add(entry(validation))
    assert history.leads(entry(0.1, "finetune"))
    assert history.scored()[0]["val_accuracy"] == 0.6


# ---- what a model takes and gives ----
def test_a_model_takes_a_graph_a_pyg_object_or_tensors(result, new):
    model = result.model("east")
    assert isinstance(model, torch.nn.Module)
    assert sum(p.numel() for p in model.parameters()) == sum(
        t.numel() for t in result.models["east"].values()
    )
    expected = model(new)
    data = Data(x=new.x, edge_index=new.edge_index)
    assert torch.equal(model(data), expected)
    assert torch.equal(model(new.x, new.edge_index), expected)
    weights = torch.ones(new.num_edges)
    assert torch.equal(model(new.x, new.edge_index, weights), expected)
    assert not torch.equal(model(new.x, new.edge_index, 0.1 * weights), expected)
    expected.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_graph_level_model_takes_a_batch_a_list_or_one_graph(graph_federation):
    model = run("fedavg", graph_federation, **QUICK).model("0")
    graphs = synthetic_graphs(graphs=4, classes=2, seed=9)
    data = [
        Data(x=part.x, edge_index=part.edge_index)
        for part in (graphs.select_items(torch.tensor([k])) for k in range(4))
    ]
    expected = model(graphs)
    assert expected.shape == (4, 2)
    assert torch.allclose(model(data), expected, atol=1e-6)
    assert torch.allclose(model(Batch.from_data_list(data)), expected, atol=1e-6)
    assert torch.allclose(model(data[2]), expected[2:3], atol=1e-6)
    assert torch.allclose(model(graphs.x, graphs.edge_index, batch=graphs.batch), expected)
    with pytest.raises(DataError, match="is a node task, the model is of a graph task"):
        model(synthetic(nodes=20, classes=2, features=graphs.num_features))


def test_predictions_have_the_users_ids_and_class_names(result, named):
    found = result.predict(client="east")
    assert found.ids.tolist() == named.graphs[0].ids.tolist()
    assert set(found.classes.tolist()) <= set(CLASSES)
    assert [CLASSES[n] for n in found.numbers] == found.classes.tolist()
    assert np.allclose(found.probabilities.sum(1), 1, atol=1e-5)
    logits = result.model("east")(named.graphs[0]).detach()
    assert np.allclose(found.probabilities, logits.softmax(1), atol=1e-6)
    assert repr(found).startswith(f"Predictions({named.graphs[0].num_items} items: ")
    both = result.predict()
    assert len(both) == sum(g.num_items for g in named.graphs)
    assert set(both.clients) == {"east", "west"}


def test_new_data_is_predicted_by_the_server_or_a_client(result, new):
    by_server, by_east = result.predict(new), result.predict(new, client="east")
    assert by_server.ids.tolist() == by_east.ids.tolist() == list(range(new.num_nodes))
    shared = result.model()(new).argmax(1)
    assert by_server.numbers.tolist() == shared.tolist()


def test_embeddings_are_the_input_of_the_classifier(result, new, named):
    model = result.model("east")
    found = result.embeddings(new, client="east")
    assert found.shape == (new.num_nodes, 8)
    with torch.no_grad():
        network = dict(model.named_children())["model"]
        assert torch.equal(network.head(found, new), model(new))
    assert result.embeddings(client="west").shape == (named.graphs[1].num_nodes, 8)
    with pytest.raises(ConfigError, match="give data, a client, or both; clients: east, west"):
        result.embeddings()


def test_tables_are_csv_parquet_or_pandas(result, named, tmp_path):
    found = result.predict(client="east")
    with open(found.to_csv(tmp_path / "p.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "class", "probability", *(f"probability_{c}" for c in CLASSES)]
    assert [row["id"] for row in rows] == named.graphs[0].ids.tolist()
    assert [row["class"] for row in rows] == found.classes.tolist()
    assert float(rows[0]["probability"]) == pytest.approx(found.probabilities[0].max(), rel=1e-4)
    pandas = pytest.importorskip("pandas")
    table = found.pandas()
    stored = pandas.read_parquet(found.write(tmp_path / "p.parquet"))
    assert stored["class"].tolist() == table["class"].tolist() == found.classes.tolist()
    assert result.predict().pandas()["client"].nunique() == 2
    with pytest.raises(ConfigError, match=r"out: 'p.txt' has no known ending; valid: .csv, "):
        found.write("p.txt")


def test_probabilities_of_large_logits_are_finite():
    found = predictions_of(np.array([[1000.0, -1000.0]], np.float32), np.arange(1), ("a", "b"))
    assert found.probabilities.tolist() == [[1.0, 0.0]]


# ---- errors ----
def test_other_features_are_refused_by_number_and_by_name(result, new):
    model = result.model("east")
    narrow = replace(new, x=new.x[:, :5].contiguous())
    with pytest.raises(DataError, match="has 5 features, the model of 'east' expects 12"):
        model(narrow)
    swapped = replace(new, x=new.x.flip(1).contiguous(), feature_names=tuple(reversed(FEATURES)))
    assert torch.equal(model(swapped), model(new))
    other = replace(new, feature_names=(*FEATURES[:-1], "amount"))
    with pytest.raises(DataError, match="it lacks f11; has, unknown to the model, amount"):
        model(other)


def test_other_objects_are_refused(result, new):
    model = result.model("east")
    for wrong, reason in (
        (HeteroData(), "a HeteroData has no x and edge_index"),
        (3, "a int has no x and edge_index"),
        (new.x, "edge_index is missing"),
    ):
        with pytest.raises(DataError, match=reason):
            model(wrong)
    with pytest.raises(ConfigError, match="give a graph"):
        model.predict()
    wrong = replace(new, edge_index=new.edge_index + new.num_nodes)
    with pytest.raises(DataError, match="out of range"):
        model(wrong.x, wrong.edge_index)


def test_clients_and_kinds_that_do_not_exist_are_refused(result, new, node_federation):
    with pytest.raises(ConfigError, match=r"unknown client 'wst'. Did you mean 'west'"):
        result.predict(new, client="wst")
    with pytest.raises(ConfigError, match="Valid: best, final"):
        result.model("east", "last")
    alone = run("local", node_federation, **QUICK)
    with pytest.raises(ConfigError, match="no server's model; choose a client: 0, 1, 2, 3"):
        alone.predict(new)
    causal = run("fedath", node_federation, **{**QUICK, "rounds": 2})
    with pytest.raises(DataError, match="does not predict by itself; choose a client: 0, 1, 2, 3"):
        causal.predict(new)


def test_the_server_of_copilots_predicts_with_the_copilot(node_federation, new):
    result = run("fml", node_federation, copilot="gcn-2x4", **{**QUICK, "rounds": 2})
    assert result.model().card.model == "gcn-2x4"
    assert len(result.predict(new)) == new.num_nodes


def test_one_party_needs_no_name(node_federation, new):
    result = run("central", node_federation, **QUICK)
    assert len(result.predict(new)) == new.num_nodes
    assert len(result.predict()) == sum(g.num_nodes for g in node_federation.graphs)


METHOD = '''
from dataclasses import dataclass
from fedloom.api import Client, FedAvg, Message, phase

@dataclass(frozen=True)
class Wide(FedAvg):
    """FedAvg of models that are wider than the run's."""
    @phase()
    def setup(self, client: Client) -> Message:
        """Builds another model."""
        super().setup(client)
        client.state["model"].extra = client.facts.build("mlp-2x4", client.name)
        return {}
    def run(self, server):
        """One evaluation."""
        server.ask(self.setup)
        for _ in server.rounds(1):
            server.evaluate()
'''


def test_a_method_that_builds_another_model_is_told_what_to_define(node_federation, tmp_path):
    (tmp_path / "wide.py").write_text(METHOD)
    result = run(str(tmp_path / "wide.py"), node_federation, model="gcn-2x8")
    with pytest.raises(DataError, match="defines `predictor` and `load_predictor`"):
        result.model("0")


# ---- files ----
@pytest.fixture(scope="module")
def folder(named, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run("fedavg", named, out=folder, **QUICK)
    return folder


def test_a_run_folder_has_best_and_final_models(folder, result, new):
    for which, models in (("best", result.models), ("final", result.final_models)):
        for owner in ("east", "west", "server"):
            path = folder / "models" / which / f"{owner}.safetensors"
            card, tensors = read_model(path)
            assert (card.owner, card.which, card.method) == (owner, which, "fedavg")
            assert card.class_names == CLASSES
            assert card.feature_names == FEATURES
            assert all(torch.equal(t, tensors[name]) for name, t in models[owner].items())
            assert (
                load_model(path).predict(new).classes.tolist()
                == (
                    result.model(None if owner == "server" else owner, which).predict(new).classes
                ).tolist()
            )
    again = load_run(folder)
    assert torch.equal(again.model("east")(new), result.model("east")(new))


def test_a_model_is_saved_without_code_and_loaded(result, new, tmp_path):
    path = result.save(tmp_path / "east.safetensors", client="east")
    assert load_file(path).keys() == result.models["east"].keys()
    model = load_model(path)
    assert torch.equal(model(new), result.model("east")(new))
    assert torch.equal(model.embeddings(new), result.embeddings(new, client="east"))
    assert "'east'" in repr(model)
    with pytest.raises(ConfigError, match="cannot write"):
        result.save(tmp_path / "missing" / "x.safetensors")


def test_a_folder_of_an_older_version_has_final_weights_only(folder, tmp_path):
    old = shutil.copytree(folder, tmp_path / "old")
    for path in (old / "models" / "final").iterdir():
        save_file(load_file(path), old / "models" / path.name)
    for which in ("best", "final"):
        shutil.rmtree(old / "models" / which)
    result = load_run(old)
    assert result.models == {}
    assert set(result.final_models) == {"east", "west", "server"}
    with pytest.raises(DataError, match=r"older version.*run again"):
        result.model("east")
    with pytest.raises(DataError, match="older version"):
        load_model(old / "models" / "east.safetensors")


def test_damaged_files_are_refused(result, tmp_path):
    path = result.save(tmp_path / "x.safetensors", client="east")
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(DataError, match="is damaged"):
        load_model(path)
    save_file({"a": torch.zeros(1)}, path, {METADATA: json.dumps({"format": "fedloom-model/9"})})
    with pytest.raises(DataError, match="has format 'fedloom-model/9'"):
        load_model(path)
    with pytest.raises(DataError, match="cannot read"):
        load_model(tmp_path / "nothing.safetensors")


def test_own_data_of_a_folder_is_made_again_from_its_recipe(folder, named, tmp_path):
    table = {
        "data": {"dataset": "synthetic:nodes=90,features=8", "split": "40/30/30"},
        "partition": {"name": "random", "clients": 3},
        "model": {"name": "gcn-2x8"},
        "method": {"name": "fedavg", "rounds": 3},
    }
    make_recipe(table).execute(tmp_path / "run")
    again = load_run(tmp_path / "run")
    assert again.federation is None
    assert accuracies(again) == reported(again)
    with pytest.raises(DataError, match=r"was given from Python.*give the data"):
        load_run(folder).predict()


# ---- the command ----
def test_the_command_writes_a_table(folder, new, tmp_path, capsys):
    to_folder(replace(new, feature_names=FEATURES), tmp_path / "new")
    for source, client in ((folder, "east"), (folder / "models/best/east.safetensors", None)):
        out = tmp_path / "p.csv"
        predict(source, str(tmp_path / "new"), out, client, "best")
        assert (
            "31 predictions of the best model of 'east' (fedavg, round " in capsys.readouterr().err
        )
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert len(rows) == 31
        assert {row["class"] for row in rows} <= set(CLASSES)
    predict(folder, str(tmp_path / "new"), None, None, "final")
    assert len(capsys.readouterr().out.splitlines()) == 32


@pytest.mark.parametrize(("label", "split"), [("", ""), ("pending", ""), ("odd", "train")])
def test_labels_and_splits_of_new_tables_are_not_read(label, split, folder, tmp_path, capsys):
    x = ["0.5"] * len(FEATURES)
    rows = [["id", *FEATURES, "label", "split"], *(["a", *x, label, split], ["b", *x, "", ""])]
    (tmp_path / "nodes.csv").write_text("\n".join(map(",".join, rows)))
    (tmp_path / "edges.csv").write_text("source,target\na,b")
    predict(folder, str(tmp_path), None, "east", "best")
    _, *found = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in found] == ["a", "b"]


def test_a_partys_folder_is_enough(result, new, tmp_path, capsys):
    party, graph = tmp_path / "party", tmp_path / "new.safetensors"
    party.mkdir()
    fedloom.to_file(new, graph)
    with pytest.raises(DataError, match="neither a run folder nor the folder of a party"):
        predict(party, str(graph), None, None, "best")
    result.save(party / "model.safetensors", client="west")
    predict(party, str(graph), None, None, "best")
    assert len(capsys.readouterr().out.splitlines()) == 32


def test_the_command_refuses_what_it_cannot_do(folder, tmp_path):
    model = folder / "models/best/east.safetensors"
    for arguments, reason in (
        ((folder, None, tmp_path / "p.txt", None, "best"), "no known ending"),
        ((folder, None, None, None, "last"), "valid: best, final"),
        ((model, "cora", None, "west", "best"), "the file holds the model of 'east'"),
        ((model, None, None, None, "best"), "data is missing"),
    ):
        with pytest.raises(ConfigError, match=reason):
            predict(*arguments)
