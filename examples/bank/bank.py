"""Three banks look for fraud together: tables, one encoding, a deployment, predictions.

    python examples/bank/bank.py bank-demo

Everything runs on this machine, in about a minute: the coordinator (`fedloom serve`) and three
banks (`fedloom join`), each in its own process, with TLS, keys and signatures. See README.md here.
"""

import argparse
import csv
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np

COUNTRIES, CHANNELS = ("DE", "FR", "NL", "PL", "XK"), ("branch", "app", "web", "phone")
FRAUD, TODAY = 0.03, date(2025, 6, 1)


@dataclass(frozen=True)
class Bank:
    """How a bank writes its tables.

    Attributes:
        name: Its name in the federation.
        unit: Amounts are in euros times this: 1 (euros), 100 (cents), 0.001 (thousands).
        classes: How it numbers its classes.
        delimiter: What separates the cells of its CSV files.
        kinds: The shares of the two kinds of fraud that it sees: rings, and taken-over accounts.
    """

    name: str
    unit: float
    classes: tuple[str, str]
    delimiter: str
    kinds: tuple[float, float]


BANKS = (
    Bank("bank-a", 1.0, ("ok", "fraud"), ",", (0.6, 0.4)),
    Bank("bank-b", 100.0, ("fraud", "ok"), ";", (0.4, 0.6)),
    Bank("bank-c", 0.001, ("ok", "fraud"), ",", (0.5, 0.5)),
)


# ---- the banks' tables ----
def write_tables(folder: Path, bank: Bank, count: int, seed: int, labelled: bool) -> None:
    """Writes the accounts and the transactions of a bank, with a graph.toml that explains them.

    Args:
        folder: Where to write nodes.csv, edges.csv, graph.toml and, without labels, truth.csv.
        bank: The bank.
        count: Number of accounts.
        seed: The seed of the random numbers.
        labelled: Whether the accounts have a label. New ones do not.
    """
    rng = np.random.default_rng(seed)
    ring, taken = (rng.random(count) < FRAUD * share for share in bank.kinds)
    fraud = ring | taken
    age = np.where(ring, rng.gamma(2.0, 150.0, count), rng.gamma(2.0, 600.0, count))  # days
    country = np.where(
        ring & (rng.random(count) < 0.6), "XK", rng.choice(COUNTRIES, count, p=_SHARES)
    )
    odd = taken & (rng.random(count) < 0.8)
    channel = np.where(odd, "phone", rng.choice(CHANNELS, count, p=(0.3, 0.4, 0.25, 0.05)))
    balance = rng.lognormal(8.0, 1.0, count)
    prefix = f"{bank.name[-1].upper()}{'L' if labelled else 'N'}"
    ids = [f"{prefix}-{10_000 + 7 * k}" for k in range(count)]
    folder.mkdir(parents=True)
    status = np.where(fraud, "fraud", "ok")
    opened = [(TODAY - timedelta(days=int(days))).isoformat() for days in age]
    amounts = [f"{bank.unit * value:.6g}" for value in balance]
    missing = rng.random(count) < 0.05
    columns = {
        "account": ids,
        "opened": opened,
        "country": country,
        "channel": channel,
        "balance": ["" if gone else text for gone, text in zip(missing, amounts, strict=True)],
    }
    _write(folder / "nodes.csv", columns | ({"status": status} if labelled else {}), bank.delimiter)
    if not labelled:
        _write(folder / "truth.csv", {"account": ids, "status": status}, ",")
    source, target, amount = _transactions(rng, ring, taken)
    _write(
        folder / "edges.csv",
        {
            "payer": [ids[k] for k in source],
            "payee": [ids[k] for k in target],
            "amount": [f"{bank.unit * value:.6g}" for value in amount],
        },
        bank.delimiter,
    )
    names = ", ".join(f'"{name}"' for name in bank.classes)
    labels = f'label = "status"\nclass_names = [{names}]\n' if labelled else ""
    (folder / "graph.toml").write_text(f"""\
id = "account"
{labels}source = "payer"
target = "payee"
weight = "amount"
aggregate = "count"

[edge_features]
paid = {{column = "amount", by = "source", aggregate = "sum"}}
largest = {{column = "amount", by = "source", aggregate = "max"}}
""")


_SHARES = (0.4, 0.25, 0.15, 0.17, 0.03)


def _transactions(rng, ring, taken):
    """Returns payers, payees and amounts. Pairs pay each other several times."""
    count = len(ring)
    pairs = rng.integers(0, count, (2, 3 * count))
    members = ring.nonzero()[0]
    if len(members) > 1:  # rings pay each other in circles
        circle = np.stack([members, np.roll(members, 1)])
        pairs = np.concatenate([pairs, circle, circle], 1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    often = rng.integers(1, 4, pairs.shape[1])
    source, target = np.repeat(pairs, often, axis=1)
    amount = rng.lognormal(4.0, 1.0, len(source))
    amount[taken[source]] *= rng.lognormal(1.3, 0.5, taken[source].sum())
    return source, target, amount


def _write(path: Path, columns: dict, delimiter: str) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


# ---- the deployment ----
AGREEMENT = """\
[federation]
address = "127.0.0.1:{port}"
authority = "ca.crt"
coordinator = "coordinator.pub"

[parties]
{parties}

[data]
class_names = ["ok", "fraud"]
split = "20/20/60"

[data.columns]
opened = "date"
country = "category"
channel = "category"
balance = {{ kind = "number", scale = "log", indicator = true }}
paid = {{ kind = "number", scale = "log" }}
largest = {{ kind = "number", scale = "log" }}

[model]
name = "sage-2x32"

[method]
name = "fedavg"
rounds = {rounds}
epochs = 10

[run]
seed = 0
selection = "pr_auc"
class_weight = "balanced"
checkpoint_every = 4
secure = {secure}
"""


def fedloom(*arguments: str, folder: Path) -> list[str]:
    """Runs a command of fedloom to its end. Returns the lines that it printed."""
    done = subprocess.run(_command(arguments), cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"fedloom {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return (done.stdout + done.stderr).splitlines()


def _command(arguments) -> list[str]:
    return [sys.executable, "-m", "fedloom", *map(str, arguments)]


def prepare(folder: Path, rounds: int, accounts: int, secure: bool) -> None:
    """Writes the banks' tables, the keys and the agreement. Everyone gets what is theirs."""
    coordinator = folder / "coordinator"
    coordinator.mkdir(parents=True)
    fedloom("keys", "127.0.0.1", "--party", "coordinator", "--out", "keys", folder=coordinator)
    public = [coordinator / "keys" / "ca.crt", coordinator / "keys" / "coordinator.pub"]
    for number, bank in enumerate(BANKS):
        home = folder / bank.name
        write_tables(home / "accounts", bank, accounts, 10 + number, labelled=True)
        write_tables(home / "new", bank, accounts // 2, 20 + number, labelled=False)
        fedloom("keys", "--party", bank.name, "--out", ".", folder=home)
        public.append(home / f"{bank.name}.pub")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agreement = AGREEMENT.format(
        port=port,
        parties="\n".join(f'{bank.name} = "{bank.name}.pub"' for bank in BANKS),
        rounds=rounds,
        secure=str(secure).lower(),
    )
    for home in (coordinator, *(folder / bank.name for bank in BANKS)):
        (home / "federation.toml").write_text(agreement)
        for file in public:
            if file.parent != home:
                (home / file.name).write_bytes(file.read_bytes())


def federate(folder: Path) -> None:
    """Runs the coordinator and the banks, each in its own process and folder."""
    commands = {
        "coordinator": ("serve", "federation.toml", "--keys", "keys", "--out", "run"),
        **{
            bank.name: (
                *("join", "federation.toml", "--party", bank.name),
                *("--key", f"{bank.name}.key", "--data", "accounts"),
            )
            for bank in BANKS
        },
    }
    started = {}
    for who, arguments in commands.items():
        with open(folder / who / "output.log", "w") as log:
            started[who] = subprocess.Popen(
                _command(arguments), cwd=folder / who, stdout=log, stderr=log
            )
    try:
        codes = {who: process.wait(900) for who, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    for who, code in codes.items():
        if code:
            sys.exit(f"{who} ended with {code}:\n{(folder / who / 'output.log').read_text()}")


def predict(folder: Path) -> None:
    """Each bank predicts for its new accounts, with the model in its own folder."""
    for bank in BANKS:
        given = (f"fedloom-{bank.name}", "--data", "new", "--out", "predictions.csv")
        fedloom("predict", *given, folder=folder / bank.name)


# ---- what came of it ----
def average_precision(score, positive) -> float:
    """Returns PR-AUC: the area under the precision-recall curve."""
    order = np.argsort(-np.asarray(score), kind="stable")
    hits = np.asarray(positive)[order]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean())


def predictions(folder: Path, bank: Bank) -> tuple[list[float], list[bool]]:
    """Returns the predicted probability of fraud of a bank's new accounts, and whether it was."""
    home = folder / bank.name
    with open(home / "new" / "truth.csv") as file:
        truth = {row["account"]: row["status"] == "fraud" for row in csv.DictReader(file)}
    with open(home / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    return [float(row["probability_fraud"]) for row in rows], [truth[row["id"]] for row in rows]


def main() -> None:
    """Plays the banks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder for everything")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--accounts", type=int, default=2000, help="per bank")
    parser.add_argument("--secure", action="store_true", help="the coordinator sees only sums")
    given = parser.parse_args()
    if given.folder.exists():
        sys.exit(f"{given.folder} exists already: choose a new folder")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare(given.folder, given.rounds, given.accounts, given.secure)
    federate(given.folder)
    predict(given.folder)
    for who in ("coordinator", *(bank.name for bank in BANKS)):
        lines = (given.folder / who / "output.log").read_text().splitlines()
        print(f"{who}: {next(line for line in lines if 'federating' in line)}")
    for bank in BANKS:
        score, fraud = predictions(given.folder, bank)
        print(
            f"{bank.name}: {len(fraud)} new accounts, {np.mean(fraud):.1%} of them fraud; "
            f"PR-AUC of the predictions {average_precision(score, fraud):.3f}"
        )


if __name__ == "__main__":
    main()
