"""Three banks with real processes: examples/bank/bank.py from tables to predictions."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "bank" / "bank.py"
BANKS = ("bank-a", "bank-b", "bank-c")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Returns the folder of the example, and what it printed."""
    folder = tmp_path_factory.mktemp("bank") / "demo"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def rows_of(path, delimiter=","):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def average_precision(score, positive):
    hits = np.asarray(positive)[np.argsort(-np.asarray(score), kind="stable")]
    return (np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean()


def test_each_bank_predicts_for_its_new_accounts_by_their_own_names(played):
    folder, _ = played
    for bank in BANKS:
        home = folder / bank
        found = rows_of(home / "predictions.csv")
        truth = rows_of(home / "new" / "truth.csv")
        assert [row["id"] for row in found] == [row["account"] for row in truth]
        assert {row["class"] for row in found} == {"ok", "fraud"}
        for row in found[:20]:
            assert float(row["probability_ok"]) + float(row["probability_fraud"]) == pytest.approx(
                1, abs=1e-5
            )


def test_the_bank_with_the_other_order_of_classes_finds_fraud(played):
    folder, _ = played
    home = folder / "bank-b"
    assert 'class_names = ["fraud", "ok"]' in (home / "accounts" / "graph.toml").read_text()
    found = rows_of(home / "predictions.csv")
    fraud = [row["status"] == "fraud" for row in rows_of(home / "new" / "truth.csv")]
    base = np.mean(fraud)
    assert 0.02 < base < 0.05
    assert average_precision([float(row["probability_fraud"]) for row in found], fraud) > 4 * base
    # The control: if its classes were swapped, it would call the accounts that are ok fraud.
    assert average_precision([float(row["probability_ok"]) for row in found], fraud) < base


def test_all_banks_have_the_same_encoding(played):
    folder, _ = played
    kept = [(folder / bank / f"fedloom-{bank}" / "encoding.json").read_text() for bank in BANKS]
    assert kept == [(folder / "coordinator" / "run" / "encoding.json").read_text()] * 3
    encoding = json.loads(kept[0])
    assert [column["name"] for column in encoding["columns"]] == sorted(
        ["opened", "country", "channel", "balance", "paid", "largest"]
    )


def test_federated_and_local_scores_are_reported_to_the_banks_and_the_coordinator(played):
    folder, printed = played
    line = r"federated (0\.\d+), Local (0\.\d+) \(PR-AUC, (.*)\): federating (gains|loses) 0\.\d+"
    said = re.findall(rf"(\S+): {line}", printed)
    assert [who for who, *_ in said] == ["coordinator", *BANKS]
    shown, local = {}, {}
    for who, federated, alone, *_ in said:
        shown[who], local[who] = float(federated), float(alone)
    for bank in BANKS:
        scores = json.loads((folder / bank / f"fedloom-{bank}" / "scores.json").read_text())
        assert scores["federated"]["pr_auc"] == pytest.approx(shown[bank], abs=6e-4)
        assert scores["local"]["pr_auc"] == pytest.approx(local[bank], abs=6e-4)
        assert [row["round"] for row in scores["history"]] == list(range(1, 9))
        log = (folder / bank / "output.log").read_text()
        assert "round 8 of 8: PR-AUC validation" in " ".join(log.split())
    summary = json.loads((folder / "coordinator" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["selection"]) == ("completed", "pr_auc")
    assert summary["local"]["pr_auc"] == pytest.approx(local["coordinator"], abs=6e-4)
    # The banks are equally large, so that both averages are those of the banks.
    assert shown["coordinator"] == pytest.approx(np.mean([shown[b] for b in BANKS]), abs=2e-3)
    assert local["coordinator"] == pytest.approx(np.mean([local[b] for b in BANKS]), abs=2e-3)


def test_the_coordinator_has_no_id_no_category_and_no_value(played):
    folder, _ = played
    private = set()
    for bank in BANKS:
        for part in ("accounts", "new"):
            for table in ("nodes.csv", "edges.csv"):
                lines = (folder / bank / part / table).read_text().splitlines()[1:]
                cells = {cell for line in lines for cell in re.split("[,;]", line)}
                private |= cells
    # Shorter numbers may be seconds or counts. Some words are agreed, or are in every log.
    private = {cell for cell in private if len(cell) > 8 or not re.fullmatch("[0-9.]*", cell)}
    private -= {"ok", "fraud", "app"}
    assert {"branch", "XK", "AL-10000"} < private
    assert sum(cell.startswith("0.") for cell in private) > 1000
    for path in (folder / "coordinator").rglob("*.*"):
        if path.is_file() and path.name != "superlink.log":
            words = set(re.findall(r"[\w.-]+", path.read_bytes().decode("latin-1")))
            assert not private & words, path


def test_a_bank_cannot_be_played_into_a_folder_that_exists(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "exists already" in done.stderr
