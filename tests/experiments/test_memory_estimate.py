"""The memory estimate grows with its causes, and a run that needs too much is refused."""

from dataclasses import replace

import pytest
import torch

from fedloom.core.registry import make_method
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic, synthetic_graphs
from fedloom.errors import ConfigError
from fedloom.experiments import memory_estimate as memory
from fedloom.experiments.memory_estimate import MB, Need, available, predict, require
from fedloom.experiments.run import agree_on_facts, run
from fedloom.experiments.settings import RunSettings


def federation_of(nodes=2000, features=16, degree=8.0, clients=4, inductive=False):
    return divide(
        synthetic(nodes, 4, features, degree, degree_exponent=0),
        clients,
        "random",
        inductive=inductive,
    )


def need_of(federation, model="gcn-2x64", at_once=1, engine="processes"):
    facts = agree_on_facts(
        make_method("local", {}), "local", federation.roster, model, 0.5, RunSettings()
    )
    return predict(federation, facts, engine, at_once).parts


GRAPHS, STEP, BUILDING, WEIGHTS, PROCESSES = memory.ADVICE


@pytest.mark.parametrize(
    ("larger", "part", "times"),
    [
        ({"nodes": 20_000}, GRAPHS, 10),
        ({"nodes": 20_000}, STEP, 10),
        ({"nodes": 20_000}, BUILDING, 10),
        ({"nodes": 20_000}, WEIGHTS, 1),
        ({"clients": 8}, STEP, 0.5),
        ({"clients": 8}, WEIGHTS, 2),
    ],
)
def test_memory_grows_with_its_causes(larger, part, times):
    few, many = need_of(federation_of()), need_of(federation_of(**larger))
    assert many[part] / few[part] == pytest.approx(times, rel=0.15)


def test_adjacencies_grow_with_edges_and_smoothed_features_with_features():
    plain = need_of(federation_of())
    assert need_of(federation_of(degree=16.0))[GRAPHS] > 1.3 * plain[GRAPHS]
    for spec, hops in (
        ("gin", 0),
        ("gcn", 1),
        ("sgc-3", 1),
        ("sign-3", 3),
    ):  # each keeps 144 more numbers per node
        narrow, wide = need_of(federation_of(), spec), need_of(federation_of(features=160), spec)
        assert wide[GRAPHS] - narrow[GRAPHS] == pytest.approx(
            hops * 2000 * 144 * 4, rel=0.05, abs=1e4
        ), spec


def test_concurrent_clients_and_larger_models_need_more():
    federation = federation_of()
    once = need_of(federation)
    assert need_of(federation, at_once=4)[STEP] == pytest.approx(4 * once[STEP], rel=0.15)
    assert (
        need_of(federation, at_once=9)[STEP] == need_of(federation, at_once=4)[STEP]
    )  # all four clients
    assert need_of(federation, "gcn-2x256")[STEP] > 3 * once[STEP]
    assert need_of(federation, "gcn-4x64")[STEP] > 2 * once[STEP]
    assert (
        need_of(federation, "gat-2x64")[STEP] > 1.5 * once[STEP]
    )  # it saves numbers for every edge


def test_weights_are_counted_from_the_model():
    weights = need_of(federation_of(), "gcn-2x64")[WEIGHTS]
    assert weights == 4 * (16 * 64 + 64 + 64 * 4 + 4) * 4 * (
        memory.COPIES_AT_CLIENT + memory.COPIES_AT_SERVER
    )


def test_different_models_add_up():
    federation = federation_of()
    mixed, gcn, sgc = (
        need_of(federation, model) for model in ("gcn-2x64,sgc-2x64", "gcn-2x64", "sgc-2x64")
    )
    assert mixed[GRAPHS] == pytest.approx((gcn[GRAPHS] + sgc[GRAPHS]) / 2, rel=0.1)
    assert mixed[STEP] == pytest.approx(max(gcn[STEP], sgc[STEP]), rel=0.1)


def test_inductive_clients_train_on_a_copy():
    assert need_of(federation_of(inductive=True))[GRAPHS] > 1.2 * need_of(federation_of())[GRAPHS]


def test_graph_tasks():
    federation = divide(synthetic_graphs(60), 3, "uniform")
    assert need_of(federation, "gin-2x16")[STEP] > 0


def test_prediction_does_not_change_federation_and_random_state():
    federation = federation_of(nodes=300)
    before = torch.get_rng_state()
    need_of(federation)
    assert torch.equal(before, torch.get_rng_state())
    assert not any(graph._cache for graph in federation.graphs)


def test_shared_memory_counts_once():
    x = torch.zeros(100)
    assert sum(memory._reachable([x, x.view(10, 10), {"again": x[:5]}, x.numpy()]).values()) == 400


def test_a_run_that_needs_too_much_is_refused_with_advice(monkeypatch):
    need = Need({GRAPHS: 300 * MB, STEP: 5000 * MB, BUILDING: 20 * MB, WEIGHTS: 10 * MB})
    monkeypatch.setattr(memory, "available", lambda: 5_331 * MB)
    assert require(need) > 5_330
    monkeypatch.setattr(memory, "available", lambda: 5_329 * MB)
    with pytest.raises(
        ConfigError, match=r"needs about 5,330 MB more .*5,329 MB are available"
    ) as caught:
        require(need)
    assert "a training step takes the most: try more clients" in str(caught.value).lower()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(memory, "available", lambda: None)  # unknown: nothing is refused
    assert require(need) > 5_330


def test_a_refused_run_writes_nothing(monkeypatch, node_federation, tmp_path):
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(ConfigError, match="memory: this run needs about"):
        run("fedavg", node_federation, model="gcn-2x8", rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_summary_has_predicted_and_measured_memory(node_federation):
    summary = run("fedavg", node_federation, model="gcn-2x8", rounds=1).summary
    assert (
        0.9 * summary["peak_rss_mb"] < summary["memory_predicted_mb"] < 1.5 * summary["peak_rss_mb"]
    )


def test_the_memory_of_the_machine_is_read(tmp_path):
    assert available() > 0
    meminfo = tmp_path / "meminfo"
    assert memory._machine_has(meminfo) is None
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:  70 kB\nHugePages_Total: 0\n")
    assert memory._machine_has(meminfo) == 70 * 1024


def test_the_memory_of_a_container_is_read(tmp_path):
    assert memory._container_has(tmp_path) is None
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("5000\n")
    (old / "memory.usage_in_bytes").write_text("1000\n")
    (old / "memory.stat").write_text("cache 1\ntotal_inactive_file 7\n")
    assert memory._container_has(tmp_path) == 4007
    (tmp_path / "memory.max").write_text("max\n")  # no limit
    assert memory._container_has(tmp_path) == 4007
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2900\n")
    (tmp_path / "memory.stat").write_text("inactive_file 50\n")
    assert memory._container_has(tmp_path) == 150


def test_clients_may_differ_in_size():
    alike, unlike = federation_of(clients=2), federation_of(clients=2)
    one, other = unlike.graphs
    small = other.subgraph(torch.arange(10))
    assert need_of(replace(unlike, graphs=(one, small)))[STEP] == pytest.approx(
        need_of(alike)[STEP], rel=0.3
    )  # that of the larger client


def test_clients_in_lockstep_have_graphs_twice_and_step_at_once(monkeypatch):
    federation = federation_of()
    alone, lockstep = need_of(federation, engine="loop"), need_of(federation, engine="stacked")
    assert lockstep[GRAPHS] == pytest.approx(2 * alone[GRAPHS])
    assert lockstep[STEP] == pytest.approx(4 * alone[STEP], rel=0.15)
    monkeypatch.setattr("fedloom.engines.stacked.engine.GROUP_BYTES", 0)
    separate = need_of(federation, engine="stacked")
    assert separate[GRAPHS] == pytest.approx(2 * alone[GRAPHS])
    assert separate[STEP] == alone[STEP]


def test_each_party_process_needs_memory():
    federation = federation_of()
    loop, flower = (need_of(federation, engine=engine) for engine in ("loop", "flower"))
    assert flower == {**loop, PROCESSES: federation.num_clients * memory.PROCESS}
