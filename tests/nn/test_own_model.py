"""A user's own torch module as the clients' model: in every method and engine, and refused ones."""

import textwrap
from pathlib import Path

import pytest
import torch
import torch_geometric.nn
from tests.test_contract import quick
from torch import nn

import fedloom
from fedloom.core.registry import method_class, method_names
from fedloom.errors import ConfigError, DataError
from fedloom.nn.build import build_model, parse_spec, split_specs
from fedloom.nn.own_model import OwnModel, own_spec
from fedloom.nn.weights import weights

FILE = '''
import torch
from torch import nn


class Net(nn.Module):
    """Two linear maps and a mean over neighbours."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = nn.Linear(in_channels, 16)
        self.head = nn.Linear(16, out_channels)

    def embed(self, x, edge_index):
        h = torch.relu(self.first(x))
        total = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return nn.functional.dropout(h + total, 0.5, self.training)

    def forward(self, x, edge_index):
        return self.head(self.embed(x, edge_index))
'''


class Plain(nn.Module):
    """A module without a split."""

    def __init__(self, num_features: int, num_classes: int):
        super().__init__()
        self.conv = torch_geometric.nn.GCNConv(num_features, 16)
        self.out = nn.Linear(16, num_classes)

    def forward(self, x, edge_index):
        h = nn.functional.dropout(self.conv(x, edge_index).relu(), 0.5, self.training)
        return self.out(h)


class Split(Plain):
    """The same module with a split, and a head that uses the edges."""

    def __init__(self, num_features: int, num_classes: int):
        super().__init__(num_features, num_classes)
        self.out = None
        self.head = torch_geometric.nn.GCNConv(16, num_classes)

    def embed(self, x, edge_index):
        h = self.conv(x, edge_index).relu()
        return nn.functional.dropout(h, 0.5, self.training)

    def forward(self, x, edge_index):
        return self.head(self.embed(x, edge_index), edge_index)


class LinearHead(Split):
    """The same module with a head that works on embeddings alone."""

    def __init__(self, num_features: int, num_classes: int):
        super().__init__(num_features, num_classes)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x, edge_index):
        return self.head(self.embed(x, edge_index))


@pytest.fixture(scope="module")
def federation() -> fedloom.Federation:
    graph = fedloom.synthetic(nodes=120, classes=3, features=12)
    return fedloom.divide(graph, clients=3, partition="louvain", seed=0, split="40/30/30")


@pytest.fixture(scope="module")
def graphs() -> fedloom.Federation:
    return fedloom.divide(
        fedloom.synthetic_graphs(graphs=60), clients=3, partition="uniform", seed=0
    )


@pytest.fixture
def net_file(tmp_path: Path) -> Path:
    path = tmp_path / "mynet.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def template() -> nn.Module:
    """A module whose parameters are the same in every run of the tests."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Plain(12, 3)


SOURCES = {
    "class": Plain,
    "split": Split,
    "PyG class": torch_geometric.nn.GraphSAGE,
    "function": lambda d, c: torch_geometric.nn.GAT(d, 16, 2, c, heads=2),
    "module": template(),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_own_module_trains(source, federation) -> None:
    result = fedloom.run("fedavg", federation, model=source, rounds=15, engine="loop")
    first, best = result.history[0]["accuracy"], result.accuracy
    assert best is not None
    assert best > 0.45  # three classes
    assert best >= first


def test_file_names_a_module(federation, net_file) -> None:
    named = fedloom.run("fedavg", federation, model=f"{net_file}:Net", rounds=3, engine="loop")
    alone = fedloom.run("fedavg", federation, model=str(net_file), rounds=3, engine="loop")
    assert named.summary["model"] == f"{net_file}:Net"
    assert named.summary["history_hash"] == alone.summary["history_hash"]


def test_clients_get_several_models_in_turn(federation, net_file) -> None:
    result = fedloom.run("local", federation, model=["gcn", Plain, f"{net_file}:Net"], rounds=1)
    names = {client: set(model) for client, model in result.models.items()}
    assert any(name.startswith("layers.") for name in names["0"])
    assert "module.conv.lin.weight" in names["1"]
    assert "module.first.weight" in names["2"]


def test_seed_decides_the_parameters() -> None:
    one, same = (build_model(own_spec(Plain), 5, 3, seed=1) for _ in range(2))
    other = build_model(own_spec(Plain), 5, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(
        torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
    template = Plain(5, 3)
    copied = build_model(own_spec(template), 5, 3, seed=1)
    assert torch.equal(weights(copied)["module.out.weight"], template.out.weight)
    assert weights(copied)["module.out.weight"].data_ptr() != template.out.weight.data_ptr()


def test_dropout_draws_from_the_given_stream_only() -> None:
    model = build_model(own_spec(Plain), 12, 3, seed=1)
    graph = fedloom.synthetic(nodes=40, classes=3, features=12)
    before = torch.get_rng_state()

    def noisy(seed: int) -> torch.Tensor:
        return model(graph, torch.Generator().manual_seed(seed))

    assert torch.equal(noisy(0), noisy(0))
    assert not torch.equal(noisy(0), noisy(1))
    assert torch.equal(model(graph), model(graph))
    assert torch.equal(torch.get_rng_state(), before)


def test_split_names_the_parameters_of_the_head() -> None:
    model = build_model(own_spec(LinearHead), 12, 3, seed=1)
    assert isinstance(model, OwnModel)
    assert {n for n in weights(model) if n.startswith("classifier.")} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert not any("head" in name for name in weights(model))
    assert model.width == 16
    assert model.linear
    assert not build_model(own_spec(Split), 12, 3, seed=1).linear


@pytest.mark.parametrize("engine", ["wire", "stacked", "processes", "stacked_processes"])
def test_every_engine_agrees_with_the_loop(engine, federation) -> None:
    for model in (Plain, LinearHead):
        loop, other = (
            fedloom.run("fedavg", federation, model=model, rounds=3, engine=e)
            for e in ("loop", engine)
        )
        assert [e["accuracy"] for e in other.history] == [e["accuracy"] for e in loop.history]
        for client, model_of in loop.models.items():
            for name, tensor in model_of.items():
                assert torch.allclose(other.models[client][name], tensor, atol=1e-5)


@pytest.mark.parametrize("name", sorted(method_names()))
def test_every_method_takes_a_module_or_says_what_is_missing(name, federation, graphs) -> None:
    cls = method_class(name)
    data = federation if "node" in cls.tasks else graphs
    if cls.uses_cross_edges:
        data = fedloom.divide(
            fedloom.synthetic(nodes=120, classes=3, features=12),
            clients=3,
            partition="louvain",
            seed=0,
            cross_edges="known",
            split="40/30/30",
        )
    run = {"name": name, **quick(name), "rounds": 1}
    if "copilot" in cls.__dataclass_fields__:
        run["copilot"] = "gcn-2x16"
    if cls.needs_of_model == "architecture":
        with pytest.raises(ConfigError, match=r"architectures; valid: .*gcn"):
            fedloom.run(run, data, model=LinearHead)
        return
    if cls.needs_of_model == "embeddings":
        with pytest.raises(ConfigError, match=r"needs embeddings and a head.*embed\(x, edge_index"):
            fedloom.run(run, data, model=Plain)
        assert fedloom.run(run, data, model=LinearHead).accuracy is not None
        return
    assert fedloom.run(run, data, model=Plain).accuracy is not None


def test_graph_task_averages_the_rows_of_nodes(graphs) -> None:
    class OfGraphs(Plain):
        def forward(self, x, edge_index, batch):
            out = super().forward(x, edge_index)
            return torch_geometric.nn.global_mean_pool(out, batch)

    for model in (Plain, OfGraphs, torch_geometric.nn.GIN, LinearHead):
        result = fedloom.run("fedavg", graphs, model=model, rounds=2, engine="loop")
        assert result.accuracy is not None


class WithBatchNorm(Plain):
    def __init__(self, num_features: int, num_classes: int):
        super().__init__(num_features, num_classes)
        self.norm = nn.BatchNorm1d(num_features)

    def forward(self, x, edge_index):
        return super().forward(self.norm(x), edge_index)


class RandomBuffer(Plain):
    def __init__(self, num_features: int, num_classes: int):
        super().__init__(num_features, num_classes)
        self.register_buffer("frequencies", torch.randn(3))


class ConstantBuffer(Plain):
    def __init__(self, num_features: int, num_classes: int):
        super().__init__(num_features, num_classes)
        self.register_buffer("frequencies", torch.arange(3.0))


class WrongShape(Plain):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index)[:, :1]


class WrongForward(Plain):
    def forward(self, x):
        return self.out(x)


class WrongSplit(LinearHead):
    def forward(self, x, edge_index):
        return 2 * super().forward(x, edge_index)


class TooManyArguments(Plain):
    def __init__(self, a: int, b: int, c: int):
        super().__init__(a, b)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (WithBatchNorm, r"buffer 'norm.running_mean' changes in training.*Use LayerNorm"),
        (RandomBuffer, r"buffer 'frequencies' changes in training or is random"),
        (WrongShape, r"forward returns \[5, 1\] for 5 nodes and 3 classes, must return \[5, 3\]"),
        (WrongForward, r"forward\(x, edge_index\) fails on a graph of 5 nodes"),
        (WrongSplit, r"forward must return head\(embed\(x, edge_index\)\)"),
        (TooManyArguments, r"cannot be built for 12 features and 3 classes.*pass a function"),
        (lambda d, c: "text", r"must give a torch.nn.Module, gave a str"),
        (lambda d, c: nn.Linear(d, c).double(), "fails on a graph of 5 nodes"),
        (3, r"model is 3; valid: a name"),
        ([], r"model is empty"),
        ("nowhere.py:Net", r"model: there is no file 'nowhere.py'"),
        (Plain(7, 3), r"fails on a graph of 5 nodes with 12 features"),
    ],
)
def test_wrong_modules_are_refused(source, error, federation) -> None:
    with pytest.raises(ConfigError, match=error):
        fedloom.run("fedavg", federation, model=source)


def test_constant_buffers_are_allowed(federation) -> None:
    assert fedloom.run("fedavg", federation, model=ConstantBuffer, rounds=1).accuracy is not None


def test_file_without_the_class_names_those_it_has(federation, net_file) -> None:
    with pytest.raises(ConfigError, match=r"defines no 'Nett'; module classes there: Net"):
        fedloom.run("fedavg", federation, model=f"{net_file}:Nett")
    net_file.write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"name one of its module classes.*there: none"):
        fedloom.run("fedavg", federation, model=str(net_file))


def test_equal_names_with_other_code_are_other_models(tmp_path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text(textwrap.dedent(FILE))
    second.write_text(textwrap.dedent(FILE).replace("16", "8"))
    one, other = own_spec(str(first)), own_spec(str(second))
    one_class, other_class = own_spec(one.source), own_spec(other.source)
    assert str(one_class) == str(other_class) == "Net"
    assert one_class != other_class
    assert parse_spec(one).name == one
    assert split_specs(f"GCN, {first}:Net") == ["gcn", f"{first}:Net"]


def test_trained_own_models_predict_and_load(federation, net_file, tmp_path) -> None:
    for number, model in enumerate((LinearHead, f"{net_file}:Net")):
        folder = tmp_path / str(number)
        result = fedloom.run("fedproto", federation, model=model, rounds=2, out=folder)
        graph = federation.graphs[0]
        logits = result.model("0")(graph)
        path = folder / "models" / "best" / "0.safetensors"
        loaded = fedloom.load_model(path, model=model)
        assert torch.equal(loaded(graph), logits)
        assert loaded.embeddings(graph).shape == (graph.num_nodes, 16)
        read = fedloom.load_run(folder, trust=True)
        if isinstance(model, str):
            assert torch.equal(fedloom.load_model(path, trust=True)(graph), logits)
            assert torch.equal(read.model("0")(graph), logits)
            continue
        for load in (lambda p=path: fedloom.load_model(p), lambda r=read: r.model("0")):
            with pytest.raises(DataError, match=r"own module.*model=LinearHead"):
                load()


def test_a_run_with_an_own_class_is_resumed_by_run(federation, tmp_path) -> None:
    def stop(entry: dict) -> None:
        if entry["round"] == 2:
            raise KeyboardInterrupt

    settings = {"model": Plain, "rounds": 4, "checkpoint_every": 1}
    whole = fedloom.run("fedavg", federation, **settings)
    with pytest.raises(KeyboardInterrupt):
        fedloom.run("fedavg", federation, **settings, out=tmp_path / "a", callbacks=stop)
    with pytest.raises(ConfigError, match=r"model .Plain. that no file defines.*resume=True"):
        fedloom.resume(tmp_path / "a", federation)
    resumed = fedloom.run("fedavg", federation, **settings, out=tmp_path / "a", resume=True)
    assert resumed.summary["history_hash"] == whole.summary["history_hash"]
