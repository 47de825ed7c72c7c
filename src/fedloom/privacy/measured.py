"""Measured disclosure: what attacks read in every method's messages, in words and numbers.

`bench/disclosure.py` measures all methods, `bench/audit.py` attacks some of them further; both
write measured.json. Nothing here is written by hand. Figures are means over the partitions that
were measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

FILE = Path(__file__).with_name("measured.json")

Figures = Mapping[str, Sequence[float]]  # a value for each partition, by name


@cache
def figures() -> Mapping[str, Any]:
    """Returns the content of measured.json: `about`, and `methods` by name."""
    content: Mapping[str, Any] = json.loads(FILE.read_text())
    return content


def statement(method: str) -> list[str]:
    """Returns what was measured of a method, in lines: when and how, then a line for each run.

    method: its name. A method that is not in the package was not measured.
    """
    found = figures()["methods"].get(method)
    if found is None:
        return ["not measured (python bench/disclosure.py measures fedloom's own methods)"]
    if "why" in found:
        return [f"not measured: {found['why']}"]
    about = figures()["about"]
    head = (
        f"{found['measured']}, round 1 on {found['data']}, {about['clients']} clients "
        f"({found['partition']}), mean of {len(about['seeds'])} partitions"
    )
    runs = {run: kinds for run, kinds in found.items() if run.startswith(("plain", "secure"))}
    lines = [
        f"{_scope(run)}: {'; '.join(_phrases(kinds, run == 'secure')) or 'nothing was read'}"
        for run, kinds in runs.items()
    ]
    if "secure" not in runs:
        lines.append("secure run: not possible")
    audits = found.get("audit", {})
    return [head, *lines, *(f"audit, {run}: {_audited(of)}" for run, of in audits.items() if of)]


def _audited(columns: Mapping[str, Sequence[Any]]) -> str:
    """Returns what an audit found: the attacks by their scores, those that bite first.

    columns: {what is attacked: score, what it gains over chance, AUC or rate}.
    """
    ordered = sorted(columns.items(), key=lambda item: -item[1][1])
    return ", ".join(
        f"{name} {'AUC ' if measure == 'AUC' else ''}{score:.2f}"
        + ("" if measure == "AUC" else f" ({gain:+.2f} over chance)")
        for name, (score, gain, measure) in ordered
    )


def cells(method: str) -> tuple[str, ...]:
    """Returns a method's row in the table of all methods.

    The columns are: features read, membership AUC, training labels, class means of one item,
    and the membership AUC in a secure run.
    """
    found = figures()["methods"].get(method)
    if found is None or "why" in found:
        return ("",) * 5
    plain, secure = found["plain"], found.get("secure", {})
    features = plain.get("features")
    read = _of(features, "right", "held") if features else ""
    labels = _labels(plain["labels"]) if "labels" in plain else ""
    single = plain.get("prototypes") or plain.get("peers")
    return (
        read,
        f"{mean(features['auc']):.2f}" if features else "",
        labels,
        _of(single, "single", "sent") if single else "",
        f"{mean(secure['features']['auc']):.2f}" if "features" in secure else "",
    )


def _scope(run: str) -> str:
    kind, _, setting = run.partition(", ")
    shown = {"plain": "plain run", "secure": "secure run, from the sums"}[kind]
    return f"{shown}, {setting}" if setting else shown


def _phrases(kinds: Mapping[str, Figures], secure: bool) -> Iterator[str]:
    """Returns a phrase for each kind of message."""
    if features := kinds.get("features"):
        wrong, auc = mean(features["pairs"]) - mean(features["right"]), mean(features["auc"])
        yield (
            f"the features that occur at some client, which tell a client's nodes from others "
            f"with AUC {auc:.2f} (chance 0.50)"
            if secure
            else f"{_of(features, 'right', 'held')} pairs of client and feature read, {wrong:,.0f} "
            f"wrong, which tell a client's nodes from others with AUC {auc:.2f} (chance 0.50)"
        )
    if labels := kinds.get("labels"):
        yield f"training labels: {_labels(labels)}"
    if held_out := kinds.get("held_out"):
        yield f"validation and test labels: counted exactly for {_of(held_out, 'exact', 'clients')}"
    if members := kinds.get("members"):
        yield (
            f"training nodes told from others with AUC {mean(members['auc']):.2f}, "
            f"{100 * mean(members['labels']):.0f} % of their labels read "
            f"({100 * mean(members['guess']):.0f} % by prediction)"
        )
    if prototypes := kinds.get("prototypes"):
        yield f"{_of(prototypes, 'single', 'sent')} class means belong to a single item"
    if peers := kinds.get("peers"):
        yield f"{_of(peers, 'single', 'sent')} rows in peer messages are a single node's"
    if pseudo := kinds.get("pseudo_graph"):
        yield (
            f"{100 * mean(pseudo['found']):.1f} % of the pseudo-graph's rows matched with their "
            f"node ({100 * mean(pseudo['chance']):.1f} % by chance), edges told with AUC "
            f"{mean(pseudo['edge_auc']):.2f}"
        )


def _labels(labels: Figures) -> str:
    exact = f"counted exactly for {_of(labels, 'exact', 'clients')} clients"
    if mean(labels["exact"]) == mean(labels["clients"]):
        return exact
    off, guess = mean(labels["off"]), mean(labels["guess"])
    return f"{exact}, shares off by {off:.2f} (by guessing {guess:.2f})"


def _of(numbers: Figures, part: str, whole: str) -> str:
    return f"{_count(mean(numbers[part]))} of {_count(mean(numbers[whole]))}"


def _count(number: float) -> str:
    """Returns a mean of counts: with a decimal if it is small and not whole."""
    return f"{number:,.0f}" if number >= 100 or number == round(number) else f"{number:.1f}"
