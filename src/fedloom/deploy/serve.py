"""`fedloom serve`: coordinates an agreement, from waiting for the parties to the run folder."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedloom._system import locked, write_atomic
from fedloom.data.encoding import Encoding
from fedloom.data.federation import PartySize
from fedloom.deploy.agreement import Agreement, host_and_port, require_tls
from fedloom.deploy.baseline import PROGRAM as LOCAL_PROGRAM
from fedloom.deploy.baseline import local_scores
from fedloom.deploy.coordinator import Coordinator
from fedloom.deploy.coordinator_transport import Address, CoordinatorTransport, SuperLinkError
from fedloom.deploy.encode import FILE as ENCODING_FILE
from fedloom.deploy.encode import PROGRAM as FIT_PROGRAM
from fedloom.deploy.encode import fit
from fedloom.deploy.engine import RemoteEngine
from fedloom.deploy.key_lock import locked_key
from fedloom.deploy.keyring import COORDINATOR, certificate_warnings
from fedloom.deploy.keys import key_file, read_party_key, require_private
from fedloom.deploy.party import Log
from fedloom.deploy.scores import gain
from fedloom.deploy.transport import Transport
from fedloom.errors import RoundFailed
from fedloom.experiments.callbacks import Given
from fedloom.experiments.recorder import Recorder
from fedloom.experiments.result import Result
from fedloom.experiments.run import run_folder, threads

MAX_SUPERLINKS = 10  # that one call of `serve` may start, one after the other


def serve(
    agreement: Agreement,
    keys: Path,
    out: Path,
    *,
    insecure: bool = False,
    wait: float = 600.0,
    resumed: dict[str, Any] | None = None,
    origin: dict[str, Any] | None = None,
    log: Log = print,
    callbacks: Given = None,
    open_transport: Callable[[], Transport] | None = None,
) -> Result:
    """Waits for the parties, runs the method with them and records the run in a folder.

    A SuperLink that dies is started again, and the run continues from its last checkpoint.

    Args:
        agreement: The coordinator's copy of the agreement.
        keys: The folder with coordinator.key, or the key that has replaced it, server.crt and
            server.key.
        out: The run folder.
        insecure: Allow a deployment without TLS on this machine.
        wait: Seconds that the parties have to join. After that a quorum is enough; the others may
            join later.
        resumed: The config of the run in the folder, to continue that run.
        origin: What the config says about the location of agreement and keys, for
            `fedloom resume`.
        log: Called with a line for each event.
        callbacks: As in `fedloom.run`.
        open_transport: Returns a transport to use instead of an own SuperLink. TLS is then the
            responsibility of that transport.
    """
    if open_transport is None:
        require_tls(agreement, insecure)
    resume = resumed is not None
    keyring = agreement.read_keyring()
    own = key_file(keys, COORDINATOR, keyring.coordinator.number)
    key = read_party_key(own)
    for line in [*keyring.warnings(), *certificate_warnings(keys)]:
        log(f"warning: {line}")
    folder = run_folder(out, resume)
    assert folder is not None
    config = resumed or {
        **_config(agreement),
        "deployment": {"lineage": secrets.token_hex(8), **(origin or {})},
    }
    lineage, faults = config["deployment"]["lineage"], agreement.run.faults
    started = 0
    with locked(folder, "run"), locked_key(own, agreement, "the coordinator"):
        run_folder(out, resume)  # again, now that no other process writes to it
        while True:
            transport: Transport
            if open_transport is None:
                address = _address(agreement, keys)
                transport = CoordinatorTransport(
                    address,
                    agreement.read_keyring().current(),
                    log=folder / "superlink.log",
                    limits=agreement.federation.limits,
                )
            else:
                transport = open_transport()
            log(f"listening on {agreement.federation.listen or agreement.federation.address}")
            try:
                coordinator = Coordinator(agreement, transport, key, lineage, faults)
                coordinator.log = log
                return _run_session(
                    agreement, coordinator, folder, config, wait, resume, log, callbacks
                )
            except SuperLinkError as error:
                started, resume = started + 1, (folder / "config.json").exists()
                if started == MAX_SUPERLINKS:
                    raise
                log(f"{error}; starting it again")
            finally:
                transport.close()


def _run_session(
    agreement: Agreement,
    coordinator: Coordinator,
    folder: Path,
    config: dict[str, Any],
    wait: float,
    resume: bool,
    log: Log,
    callbacks: Given,
) -> Result:
    """Runs the method, from the beginning or from a checkpoint, until it ends or fails."""
    method, settings = agreement.make_method(), agreement.run
    needed = max(1, math.ceil(settings.quorum * len(agreement.parties)))
    coordinator.wait_for_parties(wait, needed, log)
    if agreement.encoding is not None:
        write_atomic(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
        coordinator.encoding = _fitted(agreement, coordinator, folder / ENCODING_FILE, log)
    roster = coordinator.roster()
    facts = agreement.facts(roster)
    recorder = Recorder(roster, settings, folder, callbacks)
    recorder.config = config

    def on_join(size: PartySize) -> None:
        log(f"{size.name} has joined late: {size.items} items")
        recorder.roster = coordinator.roster()

    coordinator.on_join = on_join

    local: dict[str, float | None] = {}

    def ask_for_baselines() -> None:
        ready = sorted(coordinator.ready)
        asked = RemoteEngine(coordinator, prefix=LOCAL_PROGRAM)
        local.update(local_scores(ready, facts, coordinator.control, asked, log))

    def engine() -> RemoteEngine:
        coordinator.begin(facts)
        return RemoteEngine(coordinator, ask_for_baselines)

    with threads(settings.threads):
        name = Path(agreement.method).stem
        result = recorder.execute(name, method, facts, engine, resume, 0.0)
    if local:
        result.summary["local"] = local
        content = json.dumps(result.summary, indent=1) + "\n"
        write_atomic(folder / "summary.json", content.encode())
        log(gain(result.summary, local, settings.selection, "average over the parties"))
    return result


def _fitted(agreement: Agreement, coordinator: Coordinator, path: Path, log: Log) -> Encoding:
    """Returns the encoding of the run: from its folder, or fitted with the parties.

    The parties are the same in every attempt: two sums that differ in one party would expose it.
    """
    if path.exists():
        return Encoding.from_json(path.read_text())
    joined = sorted(coordinator.sizes)
    engine = RemoteEngine(coordinator, prefix=FIT_PROGRAM)
    for attempt in range(1 + agreement.run.retries):
        try:
            coordinator.begin_fit()
            encoding = fit(agreement, joined, engine)
            break
        except RoundFailed as error:
            if attempt == agreement.run.retries:
                raise
            log(f"the encoding is not fitted yet ({error}); trying again")
    write_atomic(path, (encoding.to_json() + "\n").encode())
    columns, features = len(encoding.columns), len(encoding.feature_names)
    log(f"the encoding is fitted to {len(joined)} parties: {columns} columns, {features} features")
    return encoding


def _address(agreement: Agreement, keys: Path) -> Address:
    listen = agreement.federation.listen or agreement.federation.address
    host, port = host_and_port(listen, "federation.listen")
    if agreement.authority is None:
        return Address(host, port)
    require_private(keys / "server.key")
    return Address(host, port, keys / "server.crt", keys / "server.key", agreement.authority)


def _config(agreement: Agreement) -> dict[str, Any]:
    agreed = agreement.agreed()
    return {
        "data": agreed["data"],
        "model": agreed["model"],
        "method": agreed["method"],
        "run": {f.name: getattr(agreement.run, f.name) for f in fields(agreement.run)},
        "parties": list(agreement.parties),
    }
