"""Callbacks: a user's own code that a run calls when it starts, after each round, and at its end.

    fedloom.run("fedavg", federation, callbacks=lambda entry: print(entry["round"]))

A callback is a function, which gets each entry of the history, or a `Callback`. If it returns True,
no further round starts: the run completes, as with `patience`. An error in a callback ends the run.

The runs' log lines are a callback too. Their logger is "fedloom.run": INFO when a run starts and
ends and after each round, WARNING for what a user should know. Nothing is printed unless logging
is configured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from fedloom.data.display import shown
from fedloom.errors import ConfigError
from fedloom.experiments.display import headline, percent

if TYPE_CHECKING:
    from fedloom.experiments.result import Result

_log = logging.getLogger("fedloom.run")


class Callback:
    """Base of callbacks. Override the functions that you need; the others do nothing."""

    def on_start(self, run: Mapping[str, Any]) -> None:
        """The clients are ready.

        Args:
            run: `method`, `dataset`, `clients`, `seed`, `folder` (None without one), `engine` and
                `engine_details`, as the summary has them, and `cautions`: lines about settings that
                tell the server more than is advised.
        """

    def on_round(self, entry: dict[str, Any], rounds: int) -> bool | None:
        """A round is over, or an evaluation outside of rounds. Return True to stop the rounds.

        Args:
            entry: The entry of the history.
            rounds: The number of rounds that the run will have.
        """

    def on_end(self, result: Result) -> None:
        """The run is over and its folder is written.

        Args:
            result: The result. `result.summary["status"]` says how the run ended: "completed",
                "stopped" (Ctrl-C, SIGTERM) or "failed".
        """


OnRound: TypeAlias = Callable[[dict[str, Any]], object]
Given: TypeAlias = Callback | OnRound | Iterable[Callback | OnRound] | None


class _Function(Callback):
    """A function of the entries as a callback."""

    def __init__(self, function: OnRound):
        self.function = function

    def on_round(self, entry: dict[str, Any], rounds: int) -> bool | None:
        return bool(self.function(entry) is True)


class _Logging(Callback):
    """Writes the log lines of a run."""

    def on_start(self, run: Mapping[str, Any]) -> None:
        self.name = f"{run['method']} on {run['dataset']}, seed {run['seed']}"
        where = f", folder {str(run['folder'])!r}" if run["folder"] else ""
        _log.info(
            "%s: starts with %s clients, engine %s%s",
            self.name, run["clients"], run["engine"], where,
        )  # fmt: skip
        if idle := run["without_training_items"]:
            names = ", ".join(idle)
            _log.warning("%s: no training item at client %s: its loss is 0", self.name, names)
        for line in run["cautions"]:
            _log.warning("%s: %s", self.name, line)

    def on_round(self, entry: dict[str, Any], rounds: int) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        scores = [
            f"{name.replace('_', ' ')} {percent(entry[name])} %"
            for name in ("val_accuracy", "accuracy")
            if entry.get(name) is not None
        ]
        if entry.get("loss") is not None:
            scores.insert(0, f"loss {entry['loss']:.4g}")
        if entry.get("epsilon") is not None:
            scores.append(f"ε {entry['epsilon']:.3f}")
        stage = entry.get("stage", "train")
        where = f"round {entry['round']} of {rounds}" + (f" ({stage})" * (stage != "train"))
        _log.info("%s: %s: %s", self.name, where, ", ".join(scores) or "not evaluated")

    def on_end(self, result: Result) -> None:
        for line in result.summary.get("warnings") or ():
            _log.warning("%s: %s", result.summary["method"], line)
        accuracy = percent(result.summary["accuracy"])
        _log.info("%s, accuracy %s %%", headline(result.summary), accuracy)


class Callbacks(Callback):
    """All callbacks of a run as one, the log lines included. The first one is called first."""

    def __init__(self, given: Given = None):
        """Checks the callbacks. Raises a ConfigError if one is neither a Callback nor a function.

        Args:
            given: One callback, several, or None.
        """
        if given is None:
            several: list[Any] = []
        elif isinstance(given, Iterable) and not isinstance(given, Callback):
            several = list(given)
        else:
            several = [given]
        self.each: list[Callback] = [_Logging()]
        for k, callback in enumerate(several):
            if isinstance(callback, type) or not (
                callable(callback) or isinstance(callback, Callback)
            ):
                raise ConfigError(
                    f"callbacks[{k}] is {shown(callback)}, must be a function of a history entry, "
                    "or an object of a subclass of fedloom.Callback"
                )
            is_object = isinstance(callback, Callback)
            self.each.append(callback if is_object else _Function(callback))

    def on_start(self, run: Mapping[str, Any]) -> None:
        """Calls all of them."""
        for callback in self.each:
            callback.on_start(run)

    def on_round(self, entry: dict[str, Any], rounds: int) -> bool:
        """Calls all of them. Returns whether one of them returned True."""
        answers = [callback.on_round(entry, rounds) for callback in self.each]  # all are called
        return True in answers

    def on_end(self, result: Result) -> None:
        """Calls all of them."""
        for callback in self.each:
            callback.on_end(result)
