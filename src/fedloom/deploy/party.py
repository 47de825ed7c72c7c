"""Party: holds a graph, executes the coordinator's orders and signs its answers.

Orders and answers travel in envelopes (`fedloom.deploy.envelope`). An order is either a phase of
the method or one of these control orders:

    order             content                     answer
    fedloom_hello     none                        what the party has agreed to, the size of its
                                                  graph, and a fresh nonce
    fedloom_begin     facts, agreement, nonce     none; an error if the party refuses the run
    fedloom_keep      mark                        none; the party saves its state in its own folder
    fedloom_restore   mark                        none; the party restores that state
    fedloom_finish    status                      none; the party saves its model in its own folder
                                                  and ends

A party begins a run only if the order contains the nonce that the party has just drawn, so that a
recorded order begins nothing. Until then the current run continues, even if another session says
hello: a recorded hello of an earlier session of the coordinator ends nothing either.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedloom._system import write_atomic
from fedloom.core.client import Client
from fedloom.core.facts import Facts, SecureTerms
from fedloom.core.message import decode, encode, flatten
from fedloom.core.method import Method
from fedloom.core.phase import phases_of
from fedloom.data.graph import Graph
from fedloom.deploy.agreement import Agreement, differences, size_of
from fedloom.deploy.envelope import EnvelopeError, Header, Kind, open_order, sign
from fedloom.deploy.framing import receive_frame, send_frame
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.party_transport import PartyTransport, RefusedError, UnreachableError
from fedloom.errors import ConfigError, DataError, FedloomError, MessageError, unknown
from fedloom.experiments import checkpoint
from fedloom.nn.weights import weights
from fedloom.privacy.secure_aggregation import responder_for

SAVED_STATES = 3  # that a party keeps: a resumed run may need the one before the last
# Seconds before a party tries again to reach the coordinator; the pause doubles each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 0.5
REFUSED_SECONDS = 10.0  # after which a party gives up on a coordinator that refuses it
ERROR_LENGTH = 1000  # characters of an error message that the coordinator receives

Log = Callable[[str], None]  # called with a line for each event


class LostStateError(FedloomError):
    """The order needs a run that the party does not know: the party was restarted."""


@dataclass
class _Session:
    """A session of the coordinator, as a party sees it.

    Attributes:
        run: The id of the session.
        sequence: The number of the last order.
        answer: The answer to that order. The same order again gets the same answer.
        nonce: The number that the party has drawn, and that the next begin must contain.
    """

    run: str
    sequence: int = -1
    answer: bytes = b""
    nonce: str = ""


class Party:
    """Answers orders.

    Attributes:
        status: How the run ended; empty before.

    Args:
        agreement: The party's own copy of the agreement.
        name: The party's name.
        key: The party's key.
        graph: The party's graph.
        folder: Where the party saves its states and, at the end, its model.
        tell_errors: Whether the coordinator receives the message of every error. A message may
            contain values of the graph. By default the coordinator receives the messages of
            fedloom's own errors; of any other error it receives the type and a number. The folder's
            errors.log has the whole error under that number.
    """

    def __init__(
        self,
        agreement: Agreement,
        name: str,
        key: PartyKey,
        graph: Graph,
        folder: Path,
        tell_errors: bool = False,
    ):
        if name not in agreement.parties:
            raise unknown("party", name, agreement.parties)
        if key.public.text() != agreement.parties[name].text():
            raise ConfigError(f"key: it does not match the key of party {name!r} in the agreement")
        self.agreement, self.name, self.key = agreement, name, key
        self.graph, self.folder, self.tell_errors = graph, folder, tell_errors
        self.agreed = agreement.agreed()
        self.status = ""
        self._lineage = ""  # the id of the run, the same through every resume
        self._session = _Session("")  # the session that has begun the current run
        self._next = _Session("")  # a session that has said hello since
        self._to_restore = ""  # the state to restore before the first order of a round
        self._method: Method | None = None
        self._client: Client | None = None

    @property
    def model(self) -> Path:
        """The file that holds the party's model when the run has ended."""
        return self.folder / "model.safetensors"

    @property
    def errors(self) -> Path:
        """The log of the errors whose messages the coordinator does not receive."""
        return self.folder / "errors.log"

    def answer(self, data: bytes) -> bytes:
        """Executes an order. Takes its envelope, returns the envelope of the answer.

        Raises EnvelopeError unless it is a current order of the coordinator to this party.
        """
        header, body = open_order(data, self.name, self.agreement.coordinator)
        known = (self._session.run, self._next.run)
        if header.phase == "fedloom_hello" and header.run not in known:
            self._next = _Session(header.run)
        session = self._session if header.run == self._session.run else self._next
        if header.run != session.run:
            error = LostStateError(f"party {self.name!r} does not know this run")
            return self._signed(header, *self._failure(error))
        if header.sequence == session.sequence:
            return session.answer
        if header.sequence < session.sequence:
            raise EnvelopeError(
                "replay", f"repeats order {header.sequence}, the last one was {session.sequence}"
            )
        session.sequence = header.sequence
        session.answer = self._signed(header, *self._execute(header, body, session))
        return session.answer

    def _signed(self, header: Header, kind: Kind, reply: bytes) -> bytes:
        answered = Header(header.run, header.round, header.sequence, self.name, header.phase, kind)
        return sign(reply, answered, self.key)

    def _execute(self, header: Header, body: bytes, session: _Session) -> tuple[Kind, bytes]:
        before = {"fedloom_hello": self._hello, "fedloom_begin": self._begin}
        during = {
            "fedloom_keep": self._save_state,
            "fedloom_restore": self._restore,
            "fedloom_finish": self._finish,
        }
        try:
            if header.phase in before:
                reply = before[header.phase](json.loads(body), session)
                return "answer", json.dumps(reply).encode()
            if session is not self._session:
                raise LostStateError(f"party {self.name!r} has not begun this run")
            if header.phase in during:
                return "answer", json.dumps(during[header.phase](json.loads(body))).encode()
            return "answer", self._perform(header, body)
        except Exception as error:  # noqa: BLE001  (the coordinator receives it and decides)
            return self._failure(error)

    def _failure(self, error: Exception) -> tuple[Kind, bytes]:
        """Returns the answer of a party that could not execute an order."""
        kind, text = type(error).__name__, " ".join(str(error).split())
        if not isinstance(error, FedloomError) and not self.tell_errors:
            text = f"the message stays with the party, {self._log_error(error)}"
        content = {
            "cause": f"{kind}: {text}"[:ERROR_LENGTH],
            "lost_state": isinstance(error, LostStateError),
        }
        return "error", json.dumps(content).encode()

    def _log_error(self, error: Exception) -> str:
        """Writes an error to the party's own log. Returns where it is, in words."""
        entry = f"as error {secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            private = partial(os.open, mode=0o600)
            with open(self.errors, "a", encoding="utf-8", opener=private) as log:
                trace = "".join(traceback.format_exception(error))
                log.write(f"{entry}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n{trace}\n")
        except OSError as failure:
            return f"which could not save it ({failure.strerror})"
        return entry

    # ---- orders ----
    def _hello(self, _: dict[str, Any], session: _Session) -> dict[str, Any]:
        session.nonce = secrets.token_hex(16)
        return {
            "nonce": session.nonce,
            "agreed": self.agreed,
            "size": size_of(self.name, self.graph),
            "knows_cross_edges": bool(self.graph.cross_edges.shape[1]),
        }

    def _begin(self, order: dict[str, Any], session: _Session) -> dict[str, Any]:
        if not session.nonce or order["nonce"] != session.nonce:
            raise MessageError("the nonce is not the one that the party has drawn: an old order")
        session.nonce = ""
        if found := differences(self.agreed, order["agreed"]):
            raise ConfigError(
                f"party {self.name!r} has agreed to something else: {'; '.join(found)}"
            )
        facts = facts_from_json(order["facts"])
        self._require_agreed(facts)
        torch.set_num_threads(self.agreement.run.threads)
        self._method, self._lineage = self.agreement.make_method(), _file_name(order, "lineage")
        self._session = session
        inductive = self.agreement.data.inductive
        self._client = Client(self.name, self.graph, facts, inductive, responder_for(facts))
        # A party that was restarted during a run continues from its last saved state.
        self._to_restore = self._latest_state() if order["rejoin"] else ""
        return {}

    def _require_agreed(self, facts: Facts) -> None:
        """Raises ConfigError if the facts do not match the party's graph and its agreement."""
        graph, settings = self.graph, self.agreement.run
        of_graph = (graph.num_features, graph.num_classes, graph.task)
        if (facts.num_features, facts.num_classes, facts.task) != of_graph:
            raise ConfigError(f"party {self.name!r}: the facts do not match its graph")
        if facts.secure != settings.terms and not self.agreement.make_method().centralized:
            raise ConfigError(f"party {self.name!r}: the terms of secure sums are not as agreed")
        if (facts.upload, facts.download) != (settings.upload, settings.download):
            raise ConfigError(f"party {self.name!r}: the filters are not as agreed")
        if facts.class_weight != settings.class_weight:
            raise ConfigError(f"party {self.name!r}: the class weights are not as agreed")

    def _perform(self, header: Header, body: bytes) -> bytes:
        method, client = self._ready()
        if self._to_restore and header.round > 0:
            self._restore({"mark": self._to_restore})
        message = decode(body, header.phase)
        phase, plain = phases_of(type(method)).get(header.phase), client.facts.secure is None
        if phase is None and (plain or hasattr(method, header.phase)):
            raise MessageError(
                f"{header.phase!r} is not a phase of method {self.agreement.method!r}"
            )
        if phase is not None and plain:
            phase.require_names(message, f"to party {self.name!r}")
        return encode(client.perform(method, header.phase, message), header.phase)

    def _save_state(self, order: dict[str, Any]) -> dict[str, Any]:
        _, client = self._ready()
        path = self._state_folder() / f"{_file_name(order, 'mark')}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, checkpoint.encode(checkpoint.Checkpoint({}, client.snapshot())))
        for old in self._saved_states()[:-SAVED_STATES]:
            old.unlink()
        return {}

    def _restore(self, order: dict[str, Any]) -> dict[str, Any]:
        _, client = self._ready()
        mark = _file_name(order, "mark")
        path = self._state_folder() / f"{mark}.safetensors"
        if not path.exists():
            raise DataError(f"party {self.name!r} has no saved state {mark}")
        client.restore(checkpoint.decode(path.read_bytes()).state)
        self._to_restore = ""
        return {}

    def _finish(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._client is not None and "model" in self._client.state:
            self.folder.mkdir(parents=True, exist_ok=True)
            tensors = flatten(weights(self._client.state["model"]))
            write_atomic(self.model, save({n: t.contiguous() for n, t in tensors.items()}))
        self.status = str(order["status"])
        return {}

    def _ready(self) -> tuple[Method, Client]:
        if self._method is None or self._client is None:
            raise LostStateError(f"party {self.name!r} has not begun this run")
        return self._method, self._client

    def _state_folder(self) -> Path:
        return state_folder(self.folder, self._lineage)

    def _saved_states(self) -> list[Path]:
        """Returns the files of the saved states, the oldest first."""
        files = self._state_folder().glob("*.safetensors")
        return sorted(files, key=lambda path: path.stat().st_mtime_ns)

    def _latest_state(self) -> str:
        """Returns the mark of the last saved state; empty if there is none."""
        states = self._saved_states() if self._state_folder().is_dir() else []
        return states[-1].stem if states else ""


def state_folder(folder: Path, lineage: str) -> Path:
    """Returns where a party with that folder saves the states of a run."""
    return folder / "states" / lineage


def _file_name(order: dict[str, Any], key: str) -> str:
    """Returns a value of an order that becomes the name of a file or folder."""
    word = order[key]
    if not isinstance(word, str) or not word.isascii() or not word.isalnum() or len(word) > 64:
        raise MessageError(f"{key} is not 1 to 64 letters and digits")
    return word


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """Returns the facts as JSON."""
    content = {f.name: getattr(facts, f.name) for f in fields(Facts)}
    secure = facts.secure and {f.name: getattr(facts.secure, f.name) for f in fields(SecureTerms)}
    lists = {"clients": list(facts.clients), "models": list(facts.models)}
    return {**content, **lists, "secure": secure}


def facts_from_json(content: dict[str, Any]) -> Facts:
    """Returns the facts in the output of `facts_to_json`."""
    secure = None if content["secure"] is None else SecureTerms(**content["secure"])
    tuples = {"clients": tuple(content["clients"]), "models": tuple(content["models"])}
    return Facts(**{**content, **tuples, "secure": secure})


# ---- the party's process ----
def run_party(party: Party, log: Log, patience: float = math.inf) -> str:
    """Answers orders until the run ends. Returns how it ended.

    The coordinator may die and come back: the party waits for it.

    Args:
        party: The party.
        log: Called with a line for each event.
        patience: Seconds without a coordinator after which the party gives up. A coordinator that
            refuses the party, or that cannot be trusted, gets `REFUSED_SECONDS` at most.
    """
    federation = party.agreement.federation
    transport = PartyTransport(federation.address, party.agreement.authority, party.key)
    connected, pause = False, FIRST_PAUSE
    lost: float | None = None  # when the coordinator was lost
    try:
        while not party.status:
            try:
                if not connected:
                    transport.connect()
                    connected, pause = True, FIRST_PAUSE
                    log(f"connected to {federation.address}")
                _answer_one(party, transport, log)
                lost = None
            except (UnreachableError, RefusedError) as error:
                if connected:
                    log(f"lost the coordinator ({error}); waiting for it")
                connected, lost = False, lost or time.monotonic()
                refused = isinstance(error, RefusedError)
                limit = min(patience, REFUSED_SECONDS) if refused else patience
                if time.monotonic() - lost > limit:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        transport.close()
    return party.status


def run_party_at_socket(party: Party, path: Path, log: Log) -> str:
    """Answers orders that arrive at a Unix socket, until the run ends. Returns how it ended.

    Flower's own SuperNode delivers them (`fedloom.deploy.apps`).

    Args:
        party: The party.
        path: The socket. Only its owner has access. It is removed at the end.
        log: Called with a line for each event.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        except OSError as error:
            raise ConfigError(
                f"socket: cannot listen at {str(path)!r} ({error.strerror or error})"
            ) from error
        finally:
            os.umask(before)
        try:
            listening.listen()
            log(f"listening at {path}")
            while not party.status:
                wire, _ = listening.accept()
                with wire:
                    try:
                        send_frame(wire, party.answer(receive_frame(wire)))
                    except (MessageError, OSError) as error:  # a wrong order, or a lost connection
                        log(f"refused: {error}")
        finally:
            path.unlink(missing_ok=True)
    return party.status


def _answer_one(party: Party, transport: PartyTransport, log: Log) -> None:
    if (order := transport.receive()) is not None:
        try:
            envelope = party.answer(order.envelope)
        except EnvelopeError as error:
            log(f"refused: {error}")
        else:
            transport.answer(order, envelope)
