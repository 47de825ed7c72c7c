"""Result: the outcome of a run, in memory or read from its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from fedloom.core.message import Message, unflatten
from fedloom.errors import DataError
from fedloom.experiments.display import data_frame, history_records, result_html, result_text
from fedloom.experiments.run_folder import read_config, read_history, read_summary


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run.

    Attributes:
        summary: What `--json` prints. The properties are its most used entries.
        models: {client: weights}, and the server's under "server".
        folder: The run folder, if there is one.
        entries: The history of a run without a folder.
    """

    summary: dict[str, Any]
    models: dict[str, Message] = field(default_factory=dict, repr=False)
    folder: Path | None = None
    entries: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        return result_text(self.summary, self.folder)

    def _repr_html_(self) -> str:
        return result_html(self.summary, self.folder)

    def pandas(self, clients: bool = False) -> Any:
        """Returns the history as a pandas DataFrame (extra `tables`).

        Args:
            clients: A row for each round and client, instead of one for each round.
        """
        return data_frame(history_records(self.history, clients))

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each round, and for each evaluation outside of rounds.

        It is read from the folder when first used.
        """
        return read_history(self.folder) if self.folder else self.entries

    @property
    def accuracy(self) -> float | None:
        """Test accuracy at the best validation round, clients weighted by size."""
        return self.summary["accuracy"]

    @property
    def per_client(self) -> list[dict[str, Any]]:
        """Each client's size, counts and scores at that round."""
        return self.summary["per_client"]

    @property
    def traffic(self) -> dict[str, Any]:
        """Bytes and scalars up and down, in total and per phase."""
        return self.summary["traffic"]


def read_run(folder: str | Path) -> Result:
    """Reads a run folder, also one of a run that was stopped or killed.

    Raises a DataError if it is not a run folder or is damaged.
    """
    folder = Path(folder)
    summary = read_summary(folder)
    config = read_config(folder) if summary is None else summary["config"]
    try:
        history = read_history(folder)
        models = {
            path.stem: unflatten(load_file(path))
            for path in sorted((folder / "models").glob("*.safetensors"))
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({error})") from error
    if summary is None:
        summary = {
            "status": "unfinished",
            "config": config,
            "rounds": history[-1]["round"] if history else 0,
        }
    return Result(summary, models, folder)
