"""Result: what a run gives, in memory or read back from its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from fedloom.core.message import Message, unflatten
from fedloom.errors import DataError
from fedloom.experiments.run_folder import read_config, read_history, read_summary


@dataclass(frozen=True)
class Result:
    """What a run gives. `summary` is what `--json` prints; the properties are its most used entries."""

    summary: dict[str, Any]
    models: dict[str, Message] = field(default_factory=dict, repr=False)
    folder: Path | None = None
    entries: list[dict[str, Any]] = field(
        default_factory=list, repr=False
    )  # of the history, if there is no folder to read it from

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each round, and for each evaluation outside of the rounds; read from the folder when first asked for."""
        return read_history(self.folder) if self.folder else self.entries

    @property
    def accuracy(self) -> float | None:
        """Test accuracy at the round with the best validation accuracy, weighted by the clients' sizes."""
        return self.summary["accuracy"]

    @property
    def per_client(self) -> list[dict[str, Any]]:
        """Each client's size, counts and scores at that round."""
        return self.summary["per_client"]

    @property
    def traffic(self) -> dict[str, Any]:
        """Bytes and scalars up and down, in all and per phase."""
        return self.summary["traffic"]


def read_run(folder: str | Path) -> Result:
    """Reads a run folder back, also one of a run that was stopped or killed. DataError if it is not one or is damaged."""
    folder = Path(folder)
    summary = read_summary(folder)
    config = read_config(folder) if summary is None else summary["config"]
    try:
        history = read_history(folder)
        kept = {
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
    return Result(summary, kept, folder)
