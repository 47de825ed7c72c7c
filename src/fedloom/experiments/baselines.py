"""Baselines: other methods on the federation of a run, kept in its folder.

A run folder has a run folder for each of its baselines, `baselines/NAME`, without models. The file
`baselines.json` has the recipes of all of them, so that `fedloom resume` can run those that are
missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom._system import write_atomic
from fedloom.errors import DataError
from fedloom.experiments.run_folder import BASELINES

PLANNED = "baselines.json"


def baseline_folder(folder: Path, method: str) -> Path:
    """Returns the run folder of a baseline.

    Args:
        folder: The run folder that it belongs to.
        method: The baseline's method: a name, or the path of a method file.
    """
    return folder / BASELINES / Path(method).stem


def write_planned(folder: Path, recipes: Sequence[Mapping[str, Any]]) -> None:
    """Writes the recipes of the baselines into the run folder."""
    write_atomic(folder / PLANNED, (json.dumps(list(recipes), indent=1) + "\n").encode())


def read_planned(folder: Path) -> list[dict[str, Any]]:
    """Returns the recipes of a run's baselines; an empty list if it has none.

    Raises a DataError if the file is damaged.
    """
    try:
        content = json.loads((folder / PLANNED).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise DataError(f"run: {str(folder)!r} is damaged ({PLANNED}: {error})") from error
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise DataError(f"run: {str(folder)!r} is damaged ({PLANNED}: it is no list of recipes)")
    return content
