"""Parties with raw tables fit one encoding before the run. No row leaves a party."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deployment import InProcessTransport, free_port

import fedloom
from fedloom.data.encoding import Encoding
from fedloom.data.federation import Federation
from fedloom.data.raw_graph import RawGraph
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.keys import make_party, read_party_key
from fedloom.deploy.party import Party
from fedloom.deploy.serve import serve
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.federated_encoding import fit_encoding
from fedloom.experiments.run_folder import read_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bank" / "bank.py"


def load_example():
    spec = importlib.util.spec_from_file_location("bank", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bank = load_example()
NAMES = [each.name for each in bank.BANKS]


class Banks:
    """The banks of the example, as objects of this process."""

    def __init__(self, folder, secure=False, accounts=200):
        self.folder = folder
        for name in ("coordinator", *NAMES):
            make_party(folder, name)
        for number, each in enumerate(bank.BANKS):
            bank.write_tables(folder / each.name, each, accounts, number, labelled=True)
        self.write(secure=secure)
        self.transport = InProcessTransport({name: self.party(name) for name in NAMES})

    def write(self, path="federation.toml", secure=False, change=lambda text: text):
        text = bank.AGREEMENT.format(
            port=free_port(),
            parties="\n".join(f'{name} = "{name}.pub"' for name in NAMES),
            rounds=3,
            secure=str(secure).lower(),
        )
        text = text.replace('authority = "ca.crt"\n', "")
        (self.folder / path).write_text(change(text))
        self.agreement = read_agreement(self.folder / path)

    def party(self, name, agreement=None):
        agreement = agreement or self.agreement
        graph = agreement.graph(self.folder / name, name)
        key = read_party_key(self.folder / f"{name}.key")
        return Party(agreement, name, key, graph, self.folder / f"state-{name}")

    def serve(self, **options):
        given = {"log": lambda line: None, "wait": 0.0, "open_transport": lambda: self.transport}
        return serve(self.agreement, self.folder, self.folder / "run", **given | options)

    def encoding(self, name):
        return Encoding.from_json((self.folder / f"state-{name}" / "encoding.json").read_text())

    def raw(self):
        return {name: self.agreement.graph(self.folder / name, name) for name in NAMES}

    def reference(self):
        """Returns the encoding of a simulation and its result, on the same tables."""
        raw = self.raw()
        encoding, _ = fit_encoding(self.agreement.encoding, raw)
        graphs = tuple(graph.encoded(encoding) for graph in raw.values())
        run, method = self.agreement.run, self.agreement.method_settings
        result = fedloom.run(
            {"name": "fedavg", **method},
            Federation(graphs, tuple(NAMES)),
            model=self.agreement.model.name,
            settings=replace(run, engine="loop", checkpoint_every=0),
        )
        return encoding, result


@pytest.fixture
def banks(tmp_path):
    return Banks(tmp_path)


# ---- the run ----
def test_all_parties_get_the_encoding_of_the_pooled_tables_and_the_run_is_that_of_the_loop(banks):
    result = banks.serve()
    encoding, reference = banks.reference()
    assert [banks.encoding(name) for name in NAMES] == [encoding] * 3
    kept = Encoding.from_json((banks.folder / "run" / "encoding.json").read_text())
    assert kept == encoding
    assert result.summary["history_hash"] == reference.summary["history_hash"]
    assert result.summary["pr_auc"] == reference.summary["pr_auc"]
    assert result.summary["class_names"] == ["ok", "fraud"]


def test_classes_in_another_order_are_the_same_classes(banks):
    graphs = banks.raw()
    for each in bank.BANKS:
        text = (banks.folder / each.name / "nodes.csv").read_text()
        assert int((graphs[each.name].y == 1).sum()) == text.count(f"{each.delimiter}fraud\n")
        assert graphs[each.name].class_names == ("ok", "fraud")
    toml = (banks.folder / "bank-b" / "graph.toml").read_text()
    assert 'class_names = ["fraud", "ok"]' in toml  # bank-b numbers them in this order


def test_with_secure_sums_the_encoding_is_the_same_and_no_summand_is_sent_in_the_clear(tmp_path):
    banks = Banks(tmp_path, secure=True)
    sent = []
    for party in banks.transport.parties.values():
        answer = party.answer
        party.answer = lambda data, answer=answer: sent.append(answer(data)) or sent[-1]
    banks.serve()
    raw = banks.raw()
    encoding, _ = fit_encoding(banks.agreement.encoding, raw)
    assert [banks.encoding(name) for name in NAMES] == [encoding] * 3
    counts = banks.agreement.encoding.summands(raw["bank-a"].table)["categories"]
    assert not any(counts.numpy().tobytes() in data for data in sent)


def test_in_a_plain_run_the_summands_are_sent_in_the_clear(banks):
    """The control of the test above."""
    sent = []
    party = banks.transport.parties["bank-a"]
    answer = party.answer
    party.answer = lambda data: sent.append(answer(data)) or sent[-1]
    banks.serve()
    counts = banks.agreement.encoding.summands(banks.raw()["bank-a"].table)["categories"]
    assert any(counts.numpy().tobytes() in data for data in sent)


def test_the_coordinator_keeps_no_id_no_category_and_no_value(banks):
    banks.serve()
    cells = set()
    for each in bank.BANKS:
        for table in ("nodes.csv", "edges.csv"):
            for line in (banks.folder / each.name / table).read_text().splitlines()[1:]:
                cells |= set(line.split(each.delimiter))
    # Shorter numbers may be seconds or counts. Some words are agreed, or are in every log.
    private = {cell for cell in cells if len(cell) > 8 or not re.fullmatch("[0-9.]*", cell)}
    private -= {"ok", "fraud", "app"}
    assert len(private) > 1000
    assert {"AL-10000", "branch", "XK"} < private
    for path in (banks.folder / "run").rglob("*.*"):
        words = set(re.findall(r"[\w.-]+", path.read_bytes().decode("latin-1")))
        assert not private & words, path


# ---- restarts ----
class StoppedError(Exception):
    """Ends a run."""


def stop_after(number):
    def stop(entry):
        if entry["round"] == number:
            raise StoppedError

    return stop


def test_a_resumed_run_and_restarted_parties_use_the_fitted_encoding(banks):
    with pytest.raises(StoppedError):
        banks.serve(callbacks=stop_after(2))
    for name in NAMES[:2]:
        (banks.folder / f"state-{name}" / "encoding.json").unlink()
        banks.transport.parties[name] = banks.party(name)
    lines = []
    result = banks.serve(resumed=read_config(banks.folder / "run"), log=lines.append)
    assert not [line for line in lines if "the encoding is fitted" in line]
    encoding, reference = banks.reference()
    assert [banks.encoding(name) for name in NAMES] == [encoding] * 3
    assert result.summary["history_hash"] == reference.summary["history_hash"]


def test_a_party_that_is_restarted_during_the_fit_takes_part_in_it(banks):
    transport, restarted = banks.transport, []
    send = transport.send

    def restart(envelopes, limit=0):
        if not restarted and any(b"fedloom_fit_totals" in data for data in envelopes.values()):
            restarted.append(True)
            transport.parties["bank-b"] = banks.party("bank-b")
        return send(envelopes)

    transport.send = restart
    result = banks.serve()
    assert restarted
    encoding, reference = banks.reference()
    assert [banks.encoding(name) for name in NAMES] == [encoding] * 3
    assert result.summary["history_hash"] == reference.summary["history_hash"]


# ---- refusals ----
def test_a_party_refuses_an_encoding_that_is_not_agreed(banks, monkeypatch):
    encoding, _ = banks.reference()
    monkeypatch.setattr("fedloom.deploy.serve.fit", lambda *_: replace(encoding, min_count=7))
    with pytest.raises(ConfigError, match="the encoding is not the agreed one"):
        banks.serve()
    assert not (banks.folder / "state-bank-a" / "encoding.json").exists()


def test_a_party_refuses_an_encoding_that_is_not_fitted(banks, monkeypatch):
    party = banks.transport.parties["bank-a"]
    with pytest.raises(ConfigError, match="the encoding is not fitted"):
        party._encode({"encoding": banks.agreement.encoding.to_json()})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'country = "category"',
            'country = "ignore"',
            'data.columns.country is "ignore" at the party and "category" at the coordinator',
        ),
        (
            'class_names = ["ok", "fraud"]',
            'class_names = ["fraud", "ok"]',
            r'data.class_names is \["fraud", "ok"\] at the party',
        ),
    ],
)
def test_a_party_with_other_columns_or_classes_is_refused_by_name(banks, old, new, words):
    coordinator = banks.agreement
    banks.write("other.toml", change=lambda text: text.replace(old, new))
    other = banks.party("bank-a")
    banks.agreement = coordinator
    banks.transport.parties["bank-a"] = other
    with pytest.raises(ConfigError, match=words):
        banks.serve()


def test_columns_in_another_order_are_the_same_columns(banks):
    coordinator, line = banks.agreement, 'country = "category"\n'

    def moved(text):
        head, tail = text.replace(line, "").split("[model]")
        return f"{head.rstrip()}\n{line}\n[model]{tail}"

    banks.write("other.toml", change=moved)
    assert list(banks.agreement.data.columns) != list(coordinator.data.columns)
    banks.transport.parties["bank-a"] = banks.party("bank-a")
    banks.agreement = coordinator
    banks.serve()
    assert banks.encoding("bank-a") == banks.encoding("bank-b")


def test_a_cell_that_does_not_fit_is_an_error_of_the_party_alone(banks):
    path = banks.folder / "bank-a" / "nodes.csv"
    lines = path.read_text().splitlines()
    account, _, *rest = lines[5].split(",")
    lines[5] = ",".join([account, "some day", *rest])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"nodes.csv, line 6, column 'opened': 'some day' is not"):
        banks.party("bank-a")


def test_an_error_about_a_cell_is_not_sent_to_the_coordinator(banks):
    party = banks.transport.parties["bank-a"]
    table = party._raw.table
    columns = {**table.columns, "opened": torch.full((table.rows,), 12345.0).double().numpy()}
    party._raw = replace(party._raw, table=replace(table, columns=columns, _parsed={}))
    with pytest.raises(Exception, match="the message stays with the party") as refusal:
        banks.serve()
    assert "12345" not in str(refusal.value)
    assert "12345" in party.errors.read_text()


def test_a_missing_column_is_refused_by_name(banks):
    banks.write(change=lambda text: text.replace('country = "cat', 'region = "cat'))
    with pytest.raises(DataError, match=r"no column 'region'. Columns there: account, opened"):
        banks.party("bank-a")


def test_columns_that_need_encoding_must_be_declared(banks):
    def without(text):
        head, tail = text.split("[data.columns]")
        return f"{head}num_features = 6\n[model]{tail.split('[model]')[1]}"

    banks.write(change=without)
    with pytest.raises(DataError, match=r"has columns that must be encoded .*\[data.columns\]"):
        banks.party("bank-a")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[data.columns]", 'feature_names = ["a"]\n[data.columns]', "data.feature_names: "),
        ("[data.columns]", "num_features = 4\n[data.columns]", "data.num_features: "),
        ('country = "category"', 'country = "colour"', "data.columns.country.kind"),
        (
            "[data.columns]",
            "[data.encoding]\nbits = 99\n[data.columns]",
            "data.encoding.bits is 99",
        ),
        ("[data.columns]", "[data.encoding]\nhue = 9\n[data.columns]", "hue"),
    ],
)
def test_wrong_declarations_are_refused(banks, old, new, words):
    with pytest.raises(ConfigError, match=words):
        banks.write(change=lambda text: text.replace(old, new, 1))


def test_a_file_is_refused_where_tables_are_agreed(banks):
    graph = banks.raw()["bank-a"]
    assert isinstance(graph, RawGraph)
    with pytest.raises(DataError, match="is a file: the agreement has"):
        banks.agreement.graph(banks.folder / "bank-a" / "nodes.csv", "bank-a")


def test_the_partys_scores_are_in_its_folder(banks):
    banks.serve()
    party = banks.transport.parties["bank-b"]
    party.conclude()
    scores = json.loads((party.folder / "scores.json").read_text())
    assert scores["selection"] == "pr_auc"
    assert scores["class_names"] == ["ok", "fraud"]
    assert [row["round"] for row in scores["history"]] == [1, 2, 3]
    assert scores["federated"]["best_of"] == "train"
