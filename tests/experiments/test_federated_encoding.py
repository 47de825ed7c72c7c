"""Parties with tables of their own: one encoding, fitted by sums, and classes by name."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedloom
from fedloom.core.client import Client
from fedloom.data.encoding import Encoding
from fedloom.data.raw_graph import RawGraph
from fedloom.data.tables import read_folder
from fedloom.errors import ConfigError, DataError, FedloomError, Refusal
from fedloom.experiments.federated_encoding import FitEncoding, encoding_facts, fit_encoding
from fedloom.experiments.recipe import make_recipe
from fedloom.privacy.choice import responder_for

SETTINGS = """
label = "kind"
weight = "amount"
aggregate = "sum"
directed = true
[edge_features]
sent = {column = "amount", by = "source", aggregate = "sum"}
"""


def bank(at: Path, seed: int, unit: float, delimiter: str = ",", settings: str = SETTINGS) -> Path:
    """Writes the tables of a bank. unit: the scale of its amounts."""
    rng = random.Random(seed)
    at.mkdir()
    nodes = [["id", "country", "opened", "vip", "balance", "owner", "kind"]]
    for k in range(40 + 10 * seed):
        balance = "" if rng.random() < 0.1 else f"{unit * rng.lognormvariate(0, 1):.4f}"
        country = rng.choice(("DE", "FR", "") if seed else ("DE", "KY"))
        kind = "fraud" if rng.random() < 0.3 else "ok"
        opened = f"20{rng.randrange(10, 24)}-05-{rng.randrange(10, 29)}"
        flag = rng.choice(("yes", "no"))
        nodes.append([f"{at.name}-{k}", country, opened, flag, balance, f"Name {seed} {k}", kind])
    edges = [["source", "target", "amount"]]
    ids = [row[0] for row in nodes[1:]]
    for _ in range(150):
        amount = f"{unit * rng.random():.4f}"
        edges.append([rng.choice(ids), rng.choice(ids), amount])
    for name, rows in (("nodes", nodes), ("edges", edges)):
        with open(at / f"{name}.csv", "w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
    (at / "graph.toml").write_text(settings)
    return at


@pytest.fixture
def banks(tmp_path) -> dict[str, Path]:
    """Three banks whose amounts have different units; each file has another delimiter."""
    settings = SETTINGS + '[columns]\nowner = "ignore"\n'
    return {
        "bank-a": bank(tmp_path / "a", 0, 1.0, ",", settings),
        "bank-b": bank(tmp_path / "b", 1, 1e5, ";"),
        "bank-c": bank(tmp_path / "c", 2, 1e-3, "|"),
    }


@pytest.mark.parametrize("secure", [False, True])
def test_the_federated_fit_is_that_of_the_pooled_tables(banks, secure):
    federation = fedloom.from_folders(banks, secure=secure)
    encoding = federation.encoding
    assert encoding.kinds == ("category", "date", "boolean", "number", "ignore", "number")
    assert federation.class_names == ("fraud", "ok")
    raw = [read_folder(path, encoding) for path in banks.values()]
    pooled = {
        name: np.concatenate([g.table.columns[name] for g in raw]) for name in ("balance", "sent")
    }
    x = torch.cat([graph.x for graph in federation.graphs]).numpy()
    names = federation.feature_names
    for name, column in pooled.items():
        fitted = make_pipeline(SimpleImputer(), StandardScaler()).fit(column[:, None])
        k = [c.name for c in encoding.columns].index(name)
        assert encoding.mean[k] == pytest.approx(fitted[1].mean_[0], rel=1e-9)
        assert encoding.deviation[k] == pytest.approx(fitted[1].scale_[0], rel=1e-9)
        expected = fitted.transform(column[:, None])[:, 0]
        np.testing.assert_allclose(x[:, names.index(name)], expected, rtol=1e-6, atol=1e-6)
    # Three countries over all parties, though no party has all of them.
    assert sum(name.startswith("country=#") for name in names) == 3
    assert not any("country=DE" in name for name in names)
    assert federation.about["encoding_bytes"] > 0
    result = fedloom.run("fedavg", federation, model="sage-2x8", rounds=2, secure=secure)
    assert result.summary["status"] == "completed"


def test_plain_and_secure_fits_are_the_same(banks):
    plain, secure = (fedloom.from_folders(banks, secure=s).encoding for s in (False, True))
    assert plain == secure


def test_a_party_answers_no_sum_in_the_clear_in_a_secure_fit(banks):
    graph = read_folder(banks["bank-a"])
    method = FitEncoding(declared=graph.declared.to_json())
    facts = encoding_facts(("a", "b", "c"), secure=fedloom.RunSettings(secure=True).terms)
    client = Client("a", graph, facts, responder=responder_for(facts, "a"))
    with pytest.raises(Refusal, match="refuses to answer 'kinds' in the clear"):
        client.perform(method, "kinds", {})


def test_the_ledger_has_every_stage_and_clients_keep_the_encoding(banks):
    graphs = {name: read_folder(path) for name, path in banks.items()}
    declared = Encoding.of({"balance": "number", "country": "category"})
    encoding, ledger = fit_encoding(declared, graphs)
    phases = ledger.traffic()["phases"]
    assert list(phases) == ["totals", "squares", "keep"]  # all kinds are declared
    assert phases["keep"]["bytes_up"] == 0
    assert encoding.stage == ""


def test_parties_learn_of_rare_categories_only_if_asked_for(tmp_path, caplog):
    for name in "abc":
        (tmp_path / name).mkdir()
        rows = [f"{k},{k % 2},{'FR' if k == 9 and name == 'a' else 'DE'}" for k in range(10)]
        nodes = "\n".join(["id,label,country", *rows])
        (tmp_path / name / "nodes.csv").write_text(f"{nodes}\n")
        (tmp_path / name / "edges.csv").write_text("source,target\n1,2\n")
    parties = {name: tmp_path / name for name in "abc"}
    graphs = {name: read_folder(path) for name, path in parties.items()}
    rules = {"country": "category"}

    def features(settings, **fit):
        caplog.clear()
        encoding, _ = fit_encoding(Encoding.of(rules, settings), graphs, **fit)
        return len(encoding.feature_names) - 1  # without "other"

    assert features({}) == 1  # FR occurs once
    assert not caplog.messages
    assert features({"min_count": 1}) == 2
    assert caplog.messages == [
        "encoding.min_count is 1: all parties learn of categories that occur fewer than 5 times"
    ]
    assert features({"min_count": 1}, secure=True) == 2
    assert not caplog.messages
    alone = Encoding.of(rules).fit(graphs["a"].table)  # nobody learns anything
    assert len(alone.feature_names) - 1 == 2


def test_inductive_fits_see_training_items_only(tmp_path):
    for name, value in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        nodes = f"id,label,split,v\n1,0,train,{value}\n2,1,test,1000\n3,1,val,50\n"
        (tmp_path / name / "nodes.csv").write_text(nodes)
        (tmp_path / name / "edges.csv").write_text("source,target\n1,2\n")
    parties = {name: tmp_path / name for name in "ab"}
    inductive = fedloom.from_folders(parties, inductive=True)
    assert inductive.encoding.mean == (2.0,)
    assert inductive.inductive
    assert inductive.about["split"] == "public"  # all parties have a split of their own
    assert fedloom.from_folders(parties).encoding.mean == pytest.approx((2104 / 6,))


def test_classes_are_matched_by_name(banks, tmp_path):
    # bank-c numbers its classes the other way round, and has one more.
    (banks["bank-c"] / "graph.toml").write_text(
        'class_names = ["ok", "unsure", "fraud"]' + SETTINGS
    )
    federation = fedloom.from_folders(banks)
    assert federation.class_names == ("fraud", "ok", "unsure")
    text = (banks["bank-c"] / "nodes.csv").read_text()
    rows = list(csv.DictReader(text.splitlines(), delimiter="|"))
    names = [federation.class_names[c] for c in federation.graphs[2].y.tolist()]
    assert names == [row["kind"] for row in rows]
    with pytest.raises(DataError, match=r"party 'bank-a': .* has the class 'fraud', which is not"):
        fedloom.from_folders(banks, class_names=["ok", "theft"])
    order = fedloom.from_folders(banks, class_names=["ok", "fraud"])
    assert order.class_names == ("ok", "fraud")


def test_numbers_and_names_of_classes_are_not_mixed(banks):
    path = banks["bank-b"] / "nodes.csv"
    path.write_text(path.read_text().replace(";fraud", ";1").replace(";ok", ";0"))
    with pytest.raises(DataError, match=r"classes: 'bank-a' has names \(fraud, ok\), 'bank-b' has"):
        fedloom.from_folders(banks)
    toml = banks["bank-b"] / "graph.toml"
    toml.write_text('class_names = ["ok", "fraud"]\n' + toml.read_text())
    federation = fedloom.from_folders(banks)
    assert federation.class_names == ("fraud", "ok")


def test_columns_that_do_not_fit(banks):
    path = banks["bank-b"] / "nodes.csv"
    right = path.read_text()
    path.write_text(right.replace("balance", "saldo"))
    with pytest.raises(DataError, match="party 'bank-a' has no column 'saldo', but 'bank-b' has"):
        fedloom.from_folders(banks)
    path.write_text(right)
    toml = banks["bank-c"] / "graph.toml"
    for party, scale in (("bank-c", "log"), ("bank-b", "none")):
        toml = banks[party] / "graph.toml"
        toml.write_text(toml.read_text() + f'[columns]\nbalance = {{scale = "{scale}"}}\n')
    with pytest.raises(ConfigError, match=r"columns.balance: 'bank-b' and 'bank-c' declare differ"):
        fedloom.from_folders(banks)
    with pytest.raises(ConfigError, match="folders is empty"):
        fedloom.from_folders({})


def test_a_secure_fit_needs_three_parties(banks):
    del banks["bank-c"]
    with pytest.raises(ConfigError, match="at least 3 clients in every sum"):
        fedloom.from_folders(banks, secure=True)


def test_parties_without_columns_get_degrees(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "nodes.csv").write_text("id,label\n1,0\n2,1\n3,1\n")
        (tmp_path / name / "edges.csv").write_text("source,target\n1,2\n")
    federation = fedloom.from_folders({n: tmp_path / n for n in "ab"}, split="40/30/30")
    assert federation.feature_names[1] == "degree=1"


def test_a_client_without_a_table_is_refused():
    graph = fedloom.synthetic(nodes=60)
    with pytest.raises(FedloomError, match="client 'a': its graph has no table of raw columns"):
        fit_encoding(Encoding.of({"v": "number"}), {"a": graph})


def test_a_part_of_a_raw_graph_has_the_rows_of_its_nodes(banks):
    graph = read_folder(banks["bank-a"])
    part = graph.subgraph(torch.tensor([3, 1]))
    assert isinstance(part, RawGraph)
    assert part.table.columns["country"].tolist() == graph.table.columns["country"][[3, 1]].tolist()
    assert part.table.lines.tolist() == [5, 3]


# ---- recipes ----
def test_a_recipe_of_parties(banks, tmp_path):
    dataset = f"parties:{tmp_path}"
    recipe = make_recipe({"data": {"dataset": dataset, "split": "40/20/40"}})
    config = recipe.config()
    assert (config["partition"]["name"], config["partition"]["clients"]) == ("given", 3)
    assert make_recipe(config).config() == config
    federation = recipe.federation()
    assert federation.names == ("a", "b", "c")
    renamed = {path.name: path for path in banks.values()}
    expected = fedloom.from_folders(renamed, split="40/20/40")
    for one, other in zip(federation.graphs, expected.graphs, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.train, other.train)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"partition": {"clients": 4}}, "partition.clients is 4, but .* has 3 parties with graphs"),
        ({"partition": {"name": "louvain"}}, "partition.name is 'louvain', but"),
        ({"partition": {"cross_edges": "known"}}, "partition.cross_edges is 'known', but"),
        ({"data": {"dataset": "parties:nowhere"}}, "there is no folder 'nowhere'"),
    ],
)
def test_a_recipe_of_parties_refuses(banks, tmp_path, tables, message):
    with pytest.raises(FedloomError, match=message):
        make_recipe({"data": {"dataset": f"parties:{tmp_path}"}} | tables)


def test_a_folder_without_parties(tmp_path):
    with pytest.raises(DataError, match="no subfolder has tables; each party needs one"):
        make_recipe({"data": {"dataset": f"parties:{tmp_path}"}})
