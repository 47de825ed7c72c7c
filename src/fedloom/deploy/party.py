"""A party: holds its graph, does what the coordinator orders as far as the agreement allows it, and signs its answers.

Orders and answers travel in envelopes (`fedloom.deploy.envelope`). Besides the method's phases there are

    fedloom_hello     {}                             ► who is there?         ◄ what it has agreed to, how much it holds, a fresh number
    fedloom_begin     facts, what is agreed, number  ► a run begins          ◄ ready, or why not
    fedloom_keep      mark                           ► keep your state       ◄ kept, in the party's own folder
    fedloom_restore   mark                           ► go back to that state
    fedloom_finish    status                         ► it is over: the party writes its model to its own folder, and leaves

A party begins a run only if the coordinator shows the number that it has just drawn itself, so that recorded orders begin nothing. Until
then the run under way goes on, whoever says hello: a recorded hello of an earlier life of the coordinator ends nothing either.
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

KEPT = (
    3  # states that a party keeps: the coordinator may have to go back to the one before the last
)
FIRST_PAUSE, LONGEST_PAUSE = (
    0.2,
    0.5,
)  # seconds before a coordinator that is not there is looked for again; longer every time
ERROR_LENGTH = 1000  # of what a party says went wrong


class ForgottenError(FedloomError):
    """The party is asked to go on with something that it knows nothing of: it has been started anew."""


@dataclass
class _Life:
    """One life of the coordinator, as far as a party knows it: the same order again gets the same answer."""

    run: str
    sequence: int = -1  # of its last order
    answer: bytes = b""
    nonce: str = ""  # what the party has drawn, and wants to be shown


class Party:
    """What answers orders. agreement: the party's own copy. folder: where it keeps its states and, in the end, its model.

    tell_errors: whether the coordinator is told the words of every error. A value of the graph may be in them, so unless that is wanted it
    gets the words of fedloom's own errors, and of any other its type and a number, under which all of it is in the folder's errors.log.
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
            raise ConfigError(f"key: it is not that of party {name!r} in the agreement")
        self.agreement, self.name, self.key, self.graph, self.folder = (
            agreement,
            name,
            key,
            graph,
            folder,
        )
        self.tell_errors = tell_errors
        self.agreed = agreement.agreed()
        self.over = ""  # how the run ended, once it has
        self._lineage = ""
        self._life, self._next = (
            _Life(""),
            _Life(""),
        )  # the one that has begun a run, and one that has said hello since
        self._to_restore = ""  # the state to go back to before the first order of a round
        self._method: Method | None = None
        self._client: Client | None = None

    @property
    def model(self) -> Path:
        """Where its model is when the run is over."""
        return self.folder / "model.safetensors"

    @property
    def errors(self) -> Path:
        """Where errors are whose words stay here."""
        return self.folder / "errors.log"

    def answer(self, data: bytes) -> bytes:
        """Takes an order's envelope, gives the answer's. An EnvelopeError if it is no order of the coordinator's to this party, now."""
        header, body = open_order(data, self.name, self.agreement.coordinator)
        if header.phase == "fedloom_hello" and header.run not in (self._life.run, self._next.run):
            self._next = _Life(header.run)
        life = self._life if header.run == self._life.run else self._next
        if header.run != life.run:
            return self._signed(
                header,
                *self._failure(ForgottenError(f"party {self.name!r} knows nothing of this run")),
            )
        if header.sequence == life.sequence:
            return life.answer
        if header.sequence < life.sequence:
            raise EnvelopeError(
                "replay",
                f"order {header.sequence} was given before, the last one was {life.sequence}",
            )
        life.sequence = header.sequence
        life.answer = self._signed(header, *self._obey(header, body, life))
        return life.answer

    def _signed(self, header: Header, kind: Kind, reply: bytes) -> bytes:
        return sign(
            reply,
            Header(header.run, header.round, header.sequence, self.name, header.phase, kind),
            self.key,
        )

    def _obey(self, header: Header, body: bytes, life: _Life) -> tuple[Kind, bytes]:
        meeting = {"fedloom_hello": self._hello, "fedloom_begin": self._begin}
        own = {
            "fedloom_keep": self._keep,
            "fedloom_restore": self._restore,
            "fedloom_finish": self._finish,
        }
        try:
            if header.phase in meeting:
                return "answer", json.dumps(meeting[header.phase](json.loads(body), life)).encode()
            if life is not self._life:
                raise ForgottenError(f"party {self.name!r} has not begun this run")
            if header.phase in own:
                return "answer", json.dumps(own[header.phase](json.loads(body))).encode()
            return "answer", self._perform(header, body)
        except Exception as error:  # noqa: BLE001  (told to the coordinator, who decides)
            return self._failure(error)

    def _failure(self, error: Exception) -> tuple[Kind, bytes]:
        """What a party answers that could not do as it was told."""
        kind, words = type(error).__name__, " ".join(str(error).split())
        if not isinstance(error, FedloomError) and not self.tell_errors:
            words = f"its words stay with the party, {self._note(error)}"
        told = {
            "cause": f"{kind}: {words}"[:ERROR_LENGTH],
            "lost_state": isinstance(error, ForgottenError),
        }
        return "error", json.dumps(told).encode()

    def _note(self, error: Exception) -> str:
        """Keeps an error in the party's own log; gives how it is called there."""
        number = f"as error {secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(
                self.errors, "a", encoding="utf-8", opener=partial(os.open, mode=0o600)
            ) as log:
                log.write(
                    f"{number}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n{''.join(traceback.format_exception(error))}\n"
                )
        except OSError as unwritten:
            return f"which could not keep them ({unwritten.strerror})"
        return number

    # ---- orders ----
    def _hello(self, _: dict[str, Any], life: _Life) -> dict[str, Any]:
        life.nonce = secrets.token_hex(16)
        knows = bool(self.graph.cross_edges.shape[1])
        size = size_of(self.name, self.graph)
        return {
            "nonce": life.nonce,
            "agreed": self.agreed,
            "size": size,
            "knows_cross_edges": knows,
        }

    def _begin(self, order: dict[str, Any], life: _Life) -> dict[str, Any]:
        if not life.nonce or order["nonce"] != life.nonce:
            raise MessageError(
                "the number shown is not the one that was given: this order is not of now"
            )
        life.nonce = ""
        if found := differences(self.agreed, order["agreed"]):
            raise ConfigError(
                f"party {self.name!r} has agreed to something else: {'; '.join(found)}"
            )
        facts = facts_from(order["facts"])
        if (facts.num_features, facts.num_classes, facts.task) != (
            self.graph.num_features,
            self.graph.num_classes,
            self.graph.task,
        ):
            raise ConfigError(f"party {self.name!r}: the facts do not fit its graph")
        if (
            facts.secure != self.agreement.run.terms
            and not self.agreement.make_method().centralized
        ):
            raise ConfigError(
                f"party {self.name!r}: the terms of secure sums are not the agreed ones"
            )
        if (facts.upload, facts.download) != (
            self.agreement.run.upload,
            self.agreement.run.download,
        ):
            raise ConfigError(f"party {self.name!r}: the filters are not the agreed ones")
        torch.set_num_threads(self.agreement.run.threads)
        self._method, self._lineage = self.agreement.make_method(), _plain(order, "lineage")
        self._life = life
        self._client = Client(
            self.name, self.graph, facts, self.agreement.data.inductive, responder_for(facts)
        )
        # Started anew in the middle of a run, it goes on from the last state that it kept itself.
        self._to_restore = self._latest() if order["rejoin"] else ""
        return {}

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

    def _keep(self, order: dict[str, Any]) -> dict[str, Any]:
        _, client = self._ready()
        self._kept().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(
            self._kept() / f"{_plain(order, 'mark')}.safetensors",
            checkpoint.encode(checkpoint.Checkpoint({}, client.snapshot())),
        )
        for old in self._marks()[:-KEPT]:
            old.unlink()
        return {}

    def _restore(self, order: dict[str, Any]) -> dict[str, Any]:
        _, client = self._ready()
        mark = _plain(order, "mark")
        path = self._kept() / f"{mark}.safetensors"
        if not path.exists():
            raise DataError(f"party {self.name!r} has kept no state {mark}")
        client.restore(checkpoint.decode(path.read_bytes()).state)
        self._to_restore = ""
        return {}

    def _finish(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._client is not None and "model" in self._client.state:
            self.folder.mkdir(parents=True, exist_ok=True)
            tensors = {
                name: tensor.contiguous()
                for name, tensor in flatten(weights(self._client.state["model"])).items()
            }
            write_atomic(self.model, save(tensors))
        self.over = str(order["status"])
        return {}

    def _ready(self) -> tuple[Method, Client]:
        if self._method is None or self._client is None:
            raise ForgottenError(f"party {self.name!r} has not begun this run")
        return self._method, self._client

    def _kept(self) -> Path:
        return kept_in(self.folder, self._lineage)

    def _marks(self) -> list[Path]:
        return sorted(self._kept().glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)

    def _latest(self) -> str:
        marks = self._marks() if self._kept().is_dir() else []
        return marks[-1].stem if marks else ""


def kept_in(folder: Path, lineage: str) -> Path:
    """Where a party with that folder keeps the states of a run."""
    return folder / "states" / lineage


def _plain(order: dict[str, Any], name: str) -> str:
    """A word of an order that becomes the name of a file or folder here."""
    word = order[name]
    if not isinstance(word, str) or not word.isascii() or not word.isalnum() or len(word) > 64:
        raise MessageError(f"{name} is not 1 to 64 letters and digits")
    return word


def facts_to(facts: Facts) -> dict[str, Any]:
    """What everybody knows before training, as JSON would say it."""
    told = {f.name: getattr(facts, f.name) for f in fields(Facts)}
    secure = facts.secure and {f.name: getattr(facts.secure, f.name) for f in fields(SecureTerms)}
    return {**told, "clients": list(facts.clients), "models": list(facts.models), "secure": secure}


def facts_from(told: dict[str, Any]) -> Facts:
    """The inverse of `facts_to`."""
    secure = None if told["secure"] is None else SecureTerms(**told["secure"])
    return Facts(
        **{
            **told,
            "clients": tuple(told["clients"]),
            "models": tuple(told["models"]),
            "secure": secure,
        }
    )


def take_part(party: Party, say: Callable[[str], None], patience: float = math.inf) -> str:
    """Answers orders until the run is over; gives how it ended. The coordinator may die and come back: it is waited for.

    say: told what happens, a line each. patience: seconds without a coordinator after which it gives up; one that does not know this
    party, or cannot be trusted, is given ten at most.
    """
    federation = party.agreement.federation
    transport = PartyTransport(federation.address, party.agreement.authority, party.key)
    connected, pause = False, FIRST_PAUSE
    lost: float | None = None  # since when nothing works
    try:
        while not party.over:
            try:
                if not connected:
                    transport.connect()
                    connected, pause = True, FIRST_PAUSE
                    say(f"connected to {federation.address}")
                _answer_one(party, transport, say)
                lost = None
            except (UnreachableError, RefusedError) as error:
                if connected:
                    say(f"lost the coordinator ({error}); waiting for it")
                connected, lost = False, lost or time.monotonic()
                if time.monotonic() - lost > (
                    patience if isinstance(error, UnreachableError) else min(patience, 10.0)
                ):
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
    finally:
        transport.close()
    return party.over


def stay(party: Party, path: Path, say: Callable[[str], None]) -> str:
    """`take_part` for a party whose messages Flower's own SuperNode brings (`fedloom.deploy.apps`).

    path: a Unix socket, which is its user's alone and goes with the party.
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
            say(f"listening at {path}")
            while not party.over:
                wire, _ = listening.accept()
                with wire:
                    try:
                        send_frame(wire, party.answer(receive_frame(wire)))
                    except (
                        MessageError,
                        OSError,
                    ) as error:  # a wrong order, or who brought it has gone
                        say(f"refused: {error}")
        finally:
            path.unlink(missing_ok=True)
    return party.over


def _answer_one(party: Party, transport: PartyTransport, say: Callable[[str], None]) -> None:
    if (order := transport.receive()) is not None:
        try:
            envelope = party.answer(order.envelope)
        except EnvelopeError as error:
            say(f"refused: {error}")
        else:
            transport.answer(order, envelope)
