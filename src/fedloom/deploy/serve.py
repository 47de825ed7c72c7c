"""`fedloom serve`: the coordinator of an agreement, from waiting for the parties to the run's folder."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedloom.data.federation import PartySize
from fedloom.deploy.agreement import Agreement, host_and_port, require_tls
from fedloom.deploy.coordinator import Coordinator
from fedloom.deploy.coordinator_transport import Address, CoordinatorTransport, SuperLinkError
from fedloom.deploy.engine import RemoteEngine
from fedloom.deploy.keys import read_party_key, require_private
from fedloom.experiments.recorder import Recorder
from fedloom.experiments.result import Result
from fedloom.experiments.run import agree_on_facts, run_folder, threads

LINKS = 10  # lives of the link that one life of the coordinator may use up

Say = Callable[[str], None]


def serve(
    agreement: Agreement, keys: Path, out: Path, *, insecure: bool = False, wait: float = 600.0, resumed: dict[str, Any] | None = None,
    origin: dict[str, Any] | None = None, say: Say = print, on_round: Callable[[dict[str, Any], int], None] | None = None,
    opened: Callable[[], Any] | None = None,
) -> Result:  # fmt: skip
    """Waits for the parties, runs the method with them, keeps the run in a folder.

    keys: the folder with coordinator.key, server.crt and server.key. out: the run's folder. wait: seconds that the parties have to come in;
    then a quorum is enough, and the others may come later. resumed: what the folder says of the run in it, to go on with. origin: what it
    is to say of where agreement and keys are, so that `fedloom resume` finds them. A link that dies is started again, and the run goes on
    from its last checkpoint. opened: gives an transport to use instead of a link of one's own; TLS is that one's affair then.
    """
    if opened is None:
        require_tls(agreement, insecure)
    resume = resumed is not None
    key, folder = read_party_key(keys / "coordinator.key"), run_folder(out, resume)
    assert folder is not None
    config = resumed or {
        **_config(agreement),
        "deployment": {"lineage": secrets.token_hex(8), **(origin or {})},
    }
    lives = 0
    while True:
        transport = (
            opened()
            if opened
            else CoordinatorTransport(
                _address(agreement, keys), agreement.parties, log=folder / "link.log"
            )
        )
        say(f"listening on {agreement.federation.listen or agreement.federation.address}")
        try:
            return _one_life(agreement, Coordinator(agreement, transport, key, config["deployment"]["lineage"], agreement.run.faults),
                             folder, config, wait, resume, say, on_round)  # fmt: skip
        except SuperLinkError as error:
            lives, resume = lives + 1, (folder / "config.json").exists()
            if lives == LINKS:
                raise
            say(f"{error}; starting it again")
        finally:
            transport.close()


def _one_life(
    agreement: Agreement,
    coordinator: Coordinator,
    folder: Path,
    config: dict[str, Any],
    wait: float,
    resume: bool,
    say: Say,
    on_round: Any,
) -> Result:
    method, rules = agreement.make_method(), agreement.run
    roster = coordinator.gather(wait, max(1, math.ceil(rules.quorum * len(agreement.parties))), say)
    facts = agree_on_facts(
        method, agreement.method, roster, agreement.model.name, agreement.model.dropout, rules
    )
    record = Recorder(roster, rules, folder, on_round)
    record.config = config

    def joined(holding: PartySize) -> None:
        say(f"{holding.name} has come: {holding.items} items")
        record.roster = coordinator.roster()

    coordinator.joined = joined

    def engine() -> RemoteEngine:
        coordinator.begin(facts)
        return RemoteEngine(coordinator)

    with threads(rules.threads):
        return record.execute(Path(agreement.method).stem, method, facts, engine, resume, 0.0)


def _address(agreement: Agreement, keys: Path) -> Address:
    listen = agreement.federation.listen or agreement.federation.address
    host, port = host_and_port(listen, "federation.listen")
    if agreement.authority is None:
        return Address(host, port)
    require_private(keys / "server.key")
    return Address(host, port, keys / "server.crt", keys / "server.key", agreement.authority)


def _config(agreement: Agreement) -> dict[str, Any]:
    agreed = agreement.agreed()
    run = {f.name: getattr(agreement.run, f.name) for f in fields(agreement.run)}
    return {
        "data": agreed["data"],
        "model": agreed["model"],
        "method": agreed["method"],
        "run": run,
        "parties": list(agreement.parties),
    }
