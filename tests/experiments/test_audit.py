"""Audit: each attack bites where nothing protects, and is held where something does."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import fedloom
from fedloom import commands
from fedloom.cli import app
from fedloom.core.message import encoded_size, schema_of
from fedloom.core.registry import make_method
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic, synthetic_graphs
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.audit import ATTACKS, audit_recipe
from fedloom.experiments.audit_file import Audit, Finding, read_audit
from fedloom.experiments.overhearing import record
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.run import run
from fedloom.experiments.settings import RunSettings
from fedloom.privacy import inference

MODEL = "gcn-2x16"


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def words():
    """Five clients with sparse features, of which each has a third."""
    graph = synthetic(nodes=250, classes=3, features=80, degree=4.0, homophily=0.9, seed=1)
    federation = divide(graph, 5, "random", 0, split="40/20/40")
    graphs = []
    for k, part in enumerate(federation.graphs):
        occurs = torch.rand(80, generator=rng(k)) < 1 / 3
        x = ((torch.rand(part.x.shape, generator=rng(10 + k)) < 0.25) & occurs).float()
        graphs.append(replace(part, x=x))
    return replace(federation, graphs=tuple(graphs), whole=None)


def audited(
    federation, name, attack, shadows=0, model=MODEL, secure=False, dropout=0.5, every=1, **method
):
    """Returns the findings of one attack, by attacker and the first word of how it works."""
    tables = {
        "method": {"name": name, **method},
        "model": {"name": model, "dropout": dropout},
        "run": {"secure": secure, "evaluate_every": every},
    }
    recipe = make_recipe(tables, federation)
    found = audit_recipe(recipe, [attack], shadows=shadows, federation=federation)
    assert {f.attack for f in found.findings} == {attack}
    return {(f.attacker, f.how.split()[0]): f for f in found.findings}


def only(found):
    (finding,) = found.values()
    return finding


# ---- what the parties see ----


def recorded(words, secure=False, name="fedavg", rounds=3, **settings):
    method = make_method(name, {"rounds": rounds, **settings})
    return record(method, name, words, MODEL, RunSettings(secure=secure), whole=True)


def test_a_recorded_run_is_the_run_itself(words):
    seen = recorded(words)
    same = run("fedavg", words, model=MODEL, rounds=3, engine="loop")
    assert seen.result.summary["history_hash"] == same.summary["history_hash"]
    assert [e.round for e in seen.exchanges if e.phase == "train"] == [1, 3]  # not the second


def test_what_is_attacked_is_what_the_ledger_has_booked(words, tmp_path):
    seen = recorded(words)
    run("fedavg", words, model=MODEL, rounds=3, engine="loop", out=tmp_path / "run")
    with open(tmp_path / "run" / "ledger.csv") as file:
        booked = [row for row in csv.DictReader(file) if row["round"] in ("0", "1", "3")]
    kept = [
        (str(e.round), e.phase, way, client, str(encoded_size(schema_of(message), e.phase)))
        for e in seen.exchanges
        for way, messages in (("down", e.received), ("up", e.replies))
        for client, message in messages.items()
        if message
    ]
    names = ("round", "phase", "direction", "client", "bytes")
    assert sorted(kept) == sorted(tuple(row[name] for name in names) for row in booked)


def test_the_server_of_a_secure_run_sees_sums_only(words):
    seen = recorded(words, secure=True)
    asked = [e for e in seen.exchanges if e.phase in ("train", "evaluate_sum")]
    assert len(asked) == 4
    assert all(not e.replies for e in asked)
    first = next(e for e in asked if e.phase == "train")
    sizes = torch.tensor([float(g.num_items) for g in words.graphs]).double()
    for name, mean in first.total["model"].items():
        each = torch.stack([a["model"][name] for a in first.answers.values()]).double()
        true = torch.tensordot(sizes / sizes.sum(), each, 1)
        assert torch.allclose(mean.double(), true, atol=1e-6)


def test_a_client_of_a_secure_run_reads_its_peers_messages_and_the_server_does_not():
    graph = synthetic(nodes=90, classes=3, features=20, degree=4.0, homophily=0.8, seed=3)
    federation = divide(graph, 3, "random", 0, cross_edges="known")
    seen = recorded(federation, secure=True, name="fedgcn", rounds=1, hops=1)
    (written,) = (e for e in seen.exchanges if e.phase == "write_sums")
    (arrived,) = (e for e in seen.exchanges if e.phase == "read_sums")
    assert not written.replies
    assert written.answers["0"]["1"]["sums"].equal(arrived.received["1"]["inbox"]["0"]["sums"])


# ---- scores ----


def test_scores_have_intervals_that_shrink_with_the_number_of_items():
    few, many = (
        inference.auc(torch.randn(n, generator=rng(1)) + 1, torch.randn(n, generator=rng(2)))
        for n in (40, 4000)
    )
    assert few.low < few.value < few.high
    assert many.high - many.low < (few.high - few.low) / 5
    assert abs(many.value - 0.76) < 0.02  # Φ(1/√2)
    assert inference.auc(torch.zeros(5), torch.zeros(9))[0] == 0.5  # ties
    assert inference.rate([1.0] * 30 + [0.0] * 10, 0.1)[0] == 0.75


def test_the_verdict_follows_what_is_gained_over_chance():
    def verdict(score, chance):
        return Finding("", "", "", score=score, chance=chance).verdict

    assert [verdict(s, 0.5) for s in (0.8, 0.7, 0.6, 0.3)] == ["bites", "partly", "held", "held"]
    assert [verdict(s, 0.0) for s in (0.6, 0.4, 0.2)] == ["bites", "partly", "held"]
    assert Finding("", "", "").verdict == "-"


# ---- labels ----


def skewed(federation):
    """Most labels of a client are of one class."""
    graphs = [
        replace(g, y=torch.where(torch.rand(g.y.shape, generator=rng(k)) < 0.8, k % 3, g.y))
        for k, g in enumerate(federation.graphs)
    ]
    return replace(federation, graphs=tuple(graphs))


def test_gradients_tell_label_shares_and_sums_do_not(words):
    plain = only(audited(skewed(words), "fedsgd", "labels", rounds=2))
    assert plain.verdict == "bites"
    assert plain.score > 0.9
    secure = only(audited(skewed(words), "fedsgd", "labels", secure=True, rounds=2))
    assert secure.verdict == "held"


def test_prototypes_come_with_counts_of_labels(words):
    plain = only(audited(words, "fedproto", "labels", rounds=1, floor=1))
    assert plain.score == 1.0
    assert "exactly for 5 of 5" in plain.why
    assert only(audited(words, "fedproto", "labels", secure=True, rounds=1)).verdict == "held"


def test_second_moments_tell_members_and_their_labels(words):
    found = audited(words, "fedgram", "labels")
    assert found["server", "label"].score > 0.9
    members = audited(words, "fedgram", "membership")
    assert members["server", "rows"].verdict == "bites"


# ---- membership ----


def noisy_labels(federation):
    """The labels are random, so that a model can only learn them by heart."""
    graphs = [
        replace(g, y=torch.randint(3, g.y.shape, generator=rng(50 + k)))
        for k, g in enumerate(federation.graphs)
    ]
    return replace(federation, graphs=tuple(graphs))


def test_an_overfitted_model_tells_its_members_and_a_fresh_one_does_not(words):
    hard = noisy_labels(words)
    overfitted = {"model": "mlp-2x64", "dropout": 0.0, "weight_decay": 0.0, "rounds": 40}
    overfitted["every"] = 40  # the last round's model is released, not an early one
    found = audited(hard, "fedavg", "membership", shadows=4, **overfitted)
    assert found["client, outsider", "loss"].verdict == "bites"
    assert found["client, outsider", "shadow"].verdict == "bites"
    assert found["server", "loss"].verdict == "bites"
    fresh = audited(hard, "fedavg", "membership", rounds=1, epochs=1, lr=1e-6)
    assert fresh["client, outsider", "loss"].score < 0.6
    assert not fresh["client, outsider", "shadow"].applies


def test_shadow_models_find_members_whose_loss_is_not_low():
    """Items differ in difficulty: a threshold on the loss fails, a comparison does not."""
    hard = 5 * torch.randn(400, generator=rng(1))
    inside = torch.arange(400) < 200
    target = hard + inside + 0.3 * torch.randn(400, generator=rng(2))
    trained = torch.rand(6, 400, generator=rng(3)) < 0.5
    shadows = hard + trained + 0.3 * torch.randn(6, 400, generator=rng(4))
    score = inference.lira(target.double(), shadows.double(), trained)
    assert inference.auc(score[inside], score[~inside]).value > 0.95
    assert inference.auc(target[inside], target[~inside]).value < 0.65


def test_a_method_without_weights_in_its_replies_tells_the_server_no_members(words):
    found = audited(words, "fedproto", "membership", rounds=1)
    assert not found["server", "loss"].applies
    assert "weights" in found["server", "loss"].why
    assert found["outsider", "loss"].applies  # if clients release their models


# ---- links ----


def test_predictions_and_queries_tell_links_and_a_model_without_edges_does_not(words):
    found = audited(words, "fedavg", "links", rounds=20)
    assert found["outsider", "whose"].score > 0.95
    assert found["outsider", "similar"].score > 0.65
    assert not found["server", "rows"].applies
    without = audited(words, "fedavg", "links", model="mlp-2x16", rounds=20)
    assert without["outsider", "whose"].score == 0.5  # nobody else's prediction changes
    assert without["outsider", "similar"].verdict != "bites"


def test_blocks_of_fedstruct_tell_edges_unless_none_are_sent():
    graph = synthetic(nodes=90, classes=3, features=20, degree=4.0, homophily=0.8, seed=3)
    federation = divide(graph, 3, "random", 0, cross_edges="known")
    plain = audited(federation, "fedstruct", "links", rounds=1)
    assert plain["client", "rows"].score > 0
    safe = audited(federation, "fedstruct", "links", rounds=1, blocks="none")
    assert safe["client", "rows"].score == 0
    labels = audited(federation, "fedstruct", "labels", rounds=5)
    assert labels["server", "label"].score > labels["server", "label"].chance


def test_a_graph_task_has_no_links_to_steal():
    sets = divide(synthetic_graphs(graphs=30, classes=2, features=4, seed=0), 3, "uniform", 0)
    found = audited(sets, "fedavg", "links", rounds=1)
    assert "graph task" in only(found).why


# ---- features ----


def test_weights_tell_words_and_sums_do_not(words):
    assert only(audited(words, "fedavg", "features", rounds=1)).verdict == "bites"
    assert only(audited(words, "fedavg", "features", rounds=1, secure=True)).score == 0.5
    assert not only(audited(words, "fedproto", "features", rounds=1)).applies


def test_rows_to_peers_are_counted_and_weights_are_not():
    graph = synthetic(nodes=60, classes=3, features=20, degree=3.0, homophily=0.8, seed=3)
    federation = divide(graph, 3, "random", 0, cross_edges="known")
    found = audited(federation, "fedgcn", "features", rounds=1, hops=1)
    assert found["client", "rows"].score > 0
    found = audited(federation, "fedsage+", "features", rounds=1, epochs=1)
    assert ("client", "rows") not in found  # its messages hold weights and noisy embeddings


# ---- inversion ----


@pytest.mark.parametrize("model", ["mlp-2x16", MODEL])
def test_a_gradient_of_one_item_is_inverted_and_a_sum_is_not(words, model):
    plain = only(audited(words, "fedsgd", "inversion", model=model, rounds=1))
    assert plain.score > 0.99
    assert "probe" in plain.sees
    secure = only(audited(words, "fedsgd", "inversion", model=model, rounds=1, secure=True))
    assert secure.verdict == "held"


def test_clients_that_are_small_are_attacked_without_a_probe(words):
    first, *rest = words.graphs
    few = replace(first, train=first.train & (first.train.cumsum(0) <= 2))
    found = only(audited(replace(words, graphs=(few, *rest)), "fedsgd", "inversion", rounds=1))
    assert "1 clients with at most 8" in found.sees
    assert found.score > 0.95


def test_a_layer_without_a_bias_is_not_inverted():
    assert inference.inverted({"weight": torch.ones(5, 2)}, 5) is None
    change = {"model": {"a.weight": torch.eye(5)[:, :2] * 3, "a.bias": torch.tensor([3.0, 1e-9])}}
    assert inference.inverted(change, 5).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


# ---- prototypes ----


def test_a_class_mean_of_one_item_is_found_unless_it_is_not_sent(words):
    first, *rest = words.graphs
    lone = (first.y == 1) & first.train
    few = replace(first, train=first.train & (~lone | (lone.cumsum(0) == 1)))
    federation = replace(words, graphs=(few, *rest))
    bare = audited(federation, "fedproto", "prototypes", rounds=2, floor=1)
    assert bare["server", "class"].score > 0
    assert audited(federation, "fedproto", "prototypes", rounds=2)["server", "class"].score == 0
    assert not only(audited(words, "fedavg", "prototypes", rounds=1)).applies


def test_a_client_receives_the_mean_of_the_only_item_of_a_class(words):
    graphs = []
    for k, graph in enumerate(words.graphs):  # class 2 has one training item, at the first client
        of_class = graph.train & (graph.y == 2)
        kept = of_class & (of_class.cumsum(0) == 1) & (k == 0)
        graphs.append(replace(graph, train=(graph.train & ~of_class) | kept))
    federation = replace(words, graphs=tuple(graphs))
    settings = {"rounds": 2, "secure": True}
    bare = audited(federation, "fedproto", "prototypes", floor=1, **settings)
    assert bare["client", "class"].score > 0
    safe = audited(federation, "fedproto", "prototypes", floor=2, **settings)
    assert safe["client", "class"].score == 0


# ---- stand-ins ----


def test_rows_of_pseudo_graphs_are_matched_if_they_are_copies(words):
    copies = only(audited(words, "fedgh", "stand-ins", **QUICK, diffused=False))
    drawn = only(audited(words, "fedgh", "stand-ins", **QUICK, regulated=False))
    assert copies.score > drawn.score + 0.2
    assert drawn.verdict == "held"


QUICK = {"rounds": 1}


# ---- cohorts ----


def test_two_sums_give_away_a_client_unless_it_refuses(words):
    recipe = make_recipe(
        {"method": {"name": "fedavg", "rounds": 1}, "run": {"secure": True}}, words
    )
    one, two = audit_recipe(recipe, ["cohorts"], shadows=0, federation=words).findings
    assert one.score == 1.0
    assert "apart = 1" in one.how
    assert two.score == 0.0
    assert "refused" in two.why
    assert not only(audited(words, "fedavg", "cohorts", rounds=1)).applies


# ---- the command, the function, the report ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "one"
    tables = {
        "data": {"dataset": "synthetic:nodes=120,classes=3,features=16"},
        "partition": {"clients": 3},
        "method": {"name": "fedavg", "rounds": 2},
    }
    make_recipe(tables).execute(place)
    return place


def test_the_command_writes_a_table_into_the_run_folder_and_the_report_shows_it(folder, tmp_path):
    done = CliRunner().invoke(
        app, ["audit", str(folder), "--attack", "links", "--attack", "labels"]
    )
    assert done.exit_code == 0, done.output
    assert "does not apply: no reply has a row for each node" in done.output.replace("\n", " ")
    kept = read_audit(folder)
    assert {f.attack for f in kept.findings} == {"links", "labels"}
    assert (folder / "audit.csv").read_text().count("\n") == len(kept.findings) + 1
    page = fedloom.report(folder, tmp_path / "page.html").read_text()
    assert "What attacks read: fedavg, plain run, seed 0" in page
    (folder / "audit.json").write_text("{")
    with pytest.warns(UserWarning, match="audit.json"):
        fedloom.report(folder, tmp_path / "page.html")
    (folder / "audit.json").unlink()


def test_the_function_returns_records_and_the_command_prints_them_as_json(folder, tmp_path):
    found = fedloom.audit(folder, "labels", out=tmp_path)
    assert isinstance(found, Audit)
    assert read_audit(tmp_path) == found
    assert not (folder / "audit.json").exists()
    args = ["audit", str(folder), "--attack", "labels", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, args)
    assert json.loads(done.stdout)["findings"] == found.records()
    secure = fedloom.audit(
        {"data": {"dataset": "synthetic:nodes=90,classes=3"}, "run": {"secure": True},
         "partition": {"clients": 3}, "method": {"rounds": 1}}, "cohorts"
    )  # fmt: skip
    assert secure.about["secure"] is True


def test_bad_input_is_one_clear_line(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"attack 'link'.*Valid: cohorts.*links"):
        fedloom.audit(folder, "link")
    with pytest.raises(DataError, match="is not a run folder"):
        fedloom.audit(tmp_path)
    with pytest.raises(ConfigError, match="unknown recipe"):
        fedloom.audit("nowhere")
    liars = {"adversary": {"clients": 1}, "partition": {"clients": 3}}
    with pytest.raises(
        ConfigError, match=r"adversary\.clients is 1: an audit measures what honest"
    ):
        fedloom.audit(liars)
    with pytest.raises(ConfigError, match="shadows is 1, must be 0 or at least 2"):
        fedloom.audit(folder, shadows=1)
    with pytest.raises(ConfigError, match="all graphs in one place"):
        fedloom.audit({"method": {"name": "central"}, "data": {"dataset": "synthetic:nodes=60"}})
    with pytest.raises(ConfigError, match="must be a run folder"):
        fedloom.audit(3)
    with pytest.raises(ConfigError, match="--set makes another run"):
        commands.audit(str(folder), [], 0, None, ["method.rounds=1"], False, False, False)
    place = tmp_path / "own"
    graph = synthetic(nodes=60, classes=3, features=8)
    run("fedavg", divide(graph, 2), rounds=1, out=place)
    with pytest.raises(ConfigError, match="a federation of its own"):
        fedloom.audit(place)


def test_every_attack_is_known_to_the_shell_and_documented():
    from fedloom.experiments import completion

    assert completion.attacks() == list(ATTACKS)
