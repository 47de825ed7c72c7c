"""Scores: what a party sees of a run. They stay in the party's folder.

A party scores models on its own held-out items when the method asks for an evaluation. `observed`
notes these scores on the way, so that nothing is computed twice. In a secure run the coordinator
sees only sums of them; the party sees its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from fedloom._system import make_private, open_private, write_atomic
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.experiments.report.labels import label
from fedloom.nn import metrics
from fedloom.nn.metric_names import MINIMISED

Row: TypeAlias = dict[str, Any]  # a round and its scores


def observed(method: Method, note: Callable[[Message], None]) -> Method:
    """Returns the same method, which hands every reply of its `evaluate` phase to `note`."""
    kind = type(method)
    phase = kind.evaluate

    @functools.wraps(phase.function)
    def evaluate(self: Method, client: Client, model: Message | None = None) -> Message:
        reply = phase.function(self, client, model)
        note(reply)
        return reply

    body = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    watching = type(kind.__name__, (kind,), {**body, "evaluate": replace(phase, function=evaluate)})
    made: Method = watching(**method.settings())
    return made


def scores_of(reply: Message, selection: str) -> dict[str, float | None]:
    """Returns the scores in a client's reply to `evaluate`, and its training loss.

    selection: the metric that chooses the best round.
    """
    parts = ("val", "test", "auc", "probabilistic")
    one = [reply[name].unsqueeze(0) for name in parts if name in reply]
    columns = metrics.all_scores(*one, selection=selection)
    loss = float(reply.get("loss", metrics.UNDEFINED))
    found = {name: values[0] for name, values in columns.items()}
    return found | {"loss": loss if loss >= 0 else None}


def gain(federated: Mapping[str, Any], local: Mapping[str, Any], metric: str, whose: str) -> str:
    """Returns a line that compares federated scores with those of the Local baseline.

    Args:
        federated: Scores of the federated model.
        local: Scores of the Local baseline.
        metric: The metric to compare.
        whose: Whose scores they are, in words.
    """
    ours, alone = federated.get(metric), local.get(metric)
    if ours is None or alone is None:
        return f"federated and Local ({label(metric)}, {whose}) cannot be compared: no test items"
    difference = round(ours, 3) - round(alone, 3)
    if metric in MINIMISED:
        difference = -difference
    verb = "gains" if difference >= 0 else "loses"
    return (
        f"federated {ours:.3f}, Local {alone:.3f} ({label(metric)}, {whose}): "
        f"federating {verb} {abs(difference):.3f}"
    )


class OwnHistory:
    """The scores of a party, round by round, in a file.

    A run that is resumed repeats rounds. The rows of a repeated round replace the earlier ones.

    Args:
        path: The file, one line of JSON for each evaluation. Rows that it holds are read.
    """

    def __init__(self, path: Path):
        self.path = path
        text = path.read_text() if path.exists() else ""
        self.rows: list[Row] = [json.loads(line) for line in text.splitlines()]
        self._added = 0  # rows since then

    def best(self, stage: str, metric: str) -> Row:
        """Returns the row that was marked last as the best of a stage.

        If none was, it is the one with the best validation score, and the last one if none has
        such a score.
        """
        marked = [row for row in self.rows if row.get("best_of") == stage]
        if marked:
            return marked[-1]
        scored = [row for row in self.rows if row.get(f"val_{metric}") is not None]
        if not scored:
            return self.rows[-1] if self.rows else {}
        sign = -1.0 if metric in MINIMISED else 1.0
        return max(scored, key=lambda row: sign * float(row[f"val_{metric}"]))

    def mark_best(self, stage: str) -> None:
        """Marks the last row: in the average over all parties, it is the best of a stage so far."""
        if self.rows:
            self.rows[-1]["best_of"] = stage
            self._write()

    def add(self, row: Row) -> None:
        """Appends the scores of an evaluation."""
        kept = len(self.rows) - self._added
        earlier = [old for old in self.rows[:kept] if old["round"] < row["round"]]
        self.rows = [*earlier, *self.rows[kept:], row]
        self._added += 1
        make_private(self.path.parent)
        if len(earlier) < kept:
            self._write()
        else:
            with open(self.path, "a", encoding="utf-8", opener=open_private) as file:
                file.write(json.dumps(row) + "\n")

    def _write(self) -> None:
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        write_atomic(self.path, text.encode())
