"""`fedloom join`: takes part in a federation, from reading the party's data to its scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from fedloom._system import locked, make_private
from fedloom.deploy.agreement import Agreement, read_agreement, require_tls
from fedloom.deploy.key_lock import END_IT, locked_key
from fedloom.deploy.keys import read_party_key
from fedloom.deploy.party import Log, Party, run_party, run_party_at_socket
from fedloom.experiments.report.labels import label

Progress: TypeAlias = Callable[[int, int, str], None]  # the round, the number of rounds, the scores


def join(
    agreement: Path,
    name: str,
    key: Path,
    data: Path,
    folder: Path,
    *,
    patience: float,
    tell_errors: bool = False,
    socket: Path | None = None,
    insecure: bool = False,
    baseline: bool = True,
    trust: bool = False,
    log: Log = print,
    progress: Progress = lambda done, planned, line: None,
) -> Party:
    """Takes part in a federation until the run ends. Returns the party.

    Args:
        agreement: The party's copy of the agreement.
        name: The party's name.
        key: Its .key file.
        data: Its graph: a folder of tables, or a file.
        folder: Where the party saves its states, model and scores.
        patience: Seconds to wait for an absent coordinator.
        tell_errors: Send the text of every error to the coordinator.
        socket: Take orders from Flower's own SuperNode at this Unix socket.
        insecure: Allow a deployment without TLS on this machine.
        baseline: Train the party's own model too, after the run, to compare.
        trust: Execute the Python files that the agreement names.
        log: Called with a line for each event.
        progress: Called with the party's own scores in each evaluation.
    """
    agreed = read_agreement(agreement, trust)
    if socket is None:
        require_tls(agreed, insecure)
    own = read_party_key(key)
    metric, rounds = agreed.run.selection, agreed.make_method().rounds

    def on_scores(row: dict[str, Any]) -> None:
        values = {"validation": row.get(f"val_{metric}"), "test": row.get(metric)}
        texts = [f"{part} {value:.3f}" for part, value in values.items() if value is not None]
        scores = f"{label(metric)} {', '.join(texts)}" if texts else "no items to score"
        progress(row["round"], rounds, scores)

    with _alone(agreed, name, key, folder):
        party = Party(
            agreed,
            name,
            own,
            agreed.graph(data, name),
            folder,
            tell_errors,
            baseline=baseline,
            on_scores=on_scores,
        )
        for line in party.keyring.warnings():
            log(f"warning: {line}")
        if socket is None:
            status = run_party(party, log, patience)
        else:
            status = run_party_at_socket(party, socket, log)
        if party.errors.exists():
            log(f"errors whose text was not sent to the coordinator: {party.errors}")
        if line := party.conclude():
            log(line)
        model = f"; this party's model: {party.model}" if party.model.exists() else ""
        log(f"the run is {status}{model}")
        return party


@contextmanager
def _alone(agreed: Agreement, name: str, key: Path, folder: Path) -> Iterator[None]:
    """Lets one process of this machine take part as a party: one for each folder and each key.

    Raises a ConfigError that names the other process. Removes a new folder that stays empty.
    """
    who, new = f"party {name!r}", not folder.exists()
    make_private(folder)
    try:
        with locked(folder, who, "state", advice=END_IT), locked_key(key, agreed, who):
            yield
    finally:
        if new and not any(folder.iterdir()):
            folder.rmdir()
