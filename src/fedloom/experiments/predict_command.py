"""The `predict` command: the classes of new data, by a model of a run or of a party."""

from __future__ import annotations

import sys
from pathlib import Path

from fedloom.errors import ConfigError, DataError
from fedloom.experiments.predictions import ENDINGS, Predictions
from fedloom.experiments.report.console import err
from fedloom.experiments.result import Result, load_run
from fedloom.experiments.run_folder import is_run
from fedloom.experiments.trained import WHICH, TrainedModel, load_model, read_data

# The files of a deployed party's folder.
OF_PARTY = dict(zip(WHICH, ("model.safetensors", "final-model.safetensors"), strict=True))


def predict(
    source: Path,
    data: str | None,
    out: Path | None,
    client: str | None,
    which: str,
    trust: bool = False,
) -> None:
    """Writes predictions as a table.

    Args:
        source: A run folder, the folder of a deployed party, or a model's file.
        data: A folder of tables, a graph's file, or a dataset. None: the clients' own data.
        out: The table to write, CSV or Parquet by its ending. None prints CSV.
        client: The client whose model predicts. None: the server's, or every client's for its own
            data.
        which: "best" or "final".
        trust: Execute the Python files that the source names as method or model.
    """
    if which not in WHICH:
        raise ConfigError(f"model: {which!r} is not valid; valid: {', '.join(WHICH)}")
    if out is not None and out.suffix not in ENDINGS:
        raise ConfigError(f"out: {str(out)!r} has no known ending; valid: {', '.join(ENDINGS)}")
    if is_run(source):
        found, by = _of_run(load_run(source, trust=trust), data, client, which)
    else:
        found, by = _of_file(load_model(_file(source, which), trust=trust), data, client)
    if out is None:
        sys.stdout.writelines(found.csv_lines())
    else:
        err.print(f"{len(found):,} predictions {by}: {found.write(out)}")


def _of_run(
    run: Result, data: str | None, client: str | None, which: str
) -> tuple[Predictions, str]:
    if data is None:
        return run.predict(client=client, which=which), f"of the {which} models"
    model = run.model(client, which)
    return model.predict(read_data(data, model.card)), _by(model)


def _of_file(model: TrainedModel, data: str | None, client: str | None) -> tuple[Predictions, str]:
    if client not in (None, model.card.owner):
        raise ConfigError(f"client: the file holds the model of {model.card.owner!r}")
    if data is None and model.own_logits is None:
        raise ConfigError("data is missing: the file holds a model, give the graph with --data")
    return model.predict(None if data is None else read_data(data, model.card)), _by(model)


def _by(model: TrainedModel) -> str:
    card = model.card
    at = "" if card.round is None else f", round {card.round}"
    return f"of the {card.which} model of {card.owner!r} ({card.method}{at})"


def _file(source: Path, which: str) -> Path:
    """Returns the file of a model: `source` itself, or the one in a party's folder."""
    if not source.is_dir():
        return source
    if not (source / OF_PARTY[which]).exists():
        raise DataError(
            f"run: {str(source)!r} is neither a run folder nor the folder of a party whose run has "
            f"ended (there is no {OF_PARTY[which]})"
        )
    return source / OF_PARTY[which]
