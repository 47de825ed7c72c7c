"""Party: holds a graph, executes the coordinator's orders and signs its answers.

Orders and answers travel in envelopes (`fedloom.deploy.envelope`). An order is either a phase of
the method or one of these control orders:

    order             content                     answer
    fedloom_hello     none                        what the party has agreed to, the size of its
                                                  graph, and a fresh nonce
    fedloom_refuse    cause                       none; the party ends, unless a run is under way
    fedloom_fit       agreement, keys, nonce      none; the fit of the encoding begins, if raw
                                                  columns are agreed (`fedloom.deploy.encode`)
    fedloom_begin     facts, agreement, keys,     none; an error if the party refuses the run
                      nonce, encoding
    fedloom_keys      keys                        none; the party takes over keys that were replaced
                                                  or revoked during the run
    fedloom_keep      mark                        none; the party saves its state in its own folder
    fedloom_restore   mark                        none; the party restores that state
    fedloom_local     seconds                     whether its Local baseline is done or declined;
                                                  the party trains it for about that long
    fedloom_best      stage                       none; the party keeps the model that it has just
                                                  scored, the best of that stage so far
    fedloom_finish    status, stage, round        none; the party saves its models in its own folder
                                                  (that of the stage's best round, and the last one)
                                                  and ends

Every answer to a control order also has `instance`, the id of the party's process. An order has
`second_process` if two processes take part as that party.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedloom._system import make_private, open_private, plain_text, write_atomic
from fedloom.core.aggregation import Responder
from fedloom.core.client import Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message, decode, encode
from fedloom.core.method import Method
from fedloom.core.phase import message_limit, phases_of
from fedloom.data.encoding import Encoding
from fedloom.data.graph import Graph
from fedloom.deploy.agreement import Agreement, differences, size_of
from fedloom.deploy.baseline import PROGRAM as LOCAL_PROGRAM
from fedloom.deploy.baseline import LocalBaseline, LocalScores
from fedloom.deploy.encode import FILE as ENCODING_FILE
from fedloom.deploy.encode import PROGRAM as FIT_PROGRAM
from fedloom.deploy.encode import encoded, fit_facts, fit_method
from fedloom.deploy.envelope import EnvelopeError, Header, Kind, open_order, sign
from fedloom.deploy.framing import receive_frame, send_frame
from fedloom.deploy.keyring import MEMORY_FILE, KeyMemory
from fedloom.deploy.keys import PartyKey
from fedloom.deploy.party_transport import PartyTransport, RefusedError, UnreachableError
from fedloom.deploy.scores import OwnHistory, gain, observed, scores_of
from fedloom.errors import ConfigError, DataError, FedloomError, MessageError, Refusal, unknown
from fedloom.experiments import checkpoint
from fedloom.experiments.trained import ModelCard, model_bytes
from fedloom.privacy.choice import responder_for
from fedloom.privacy.identity import Identity
from fedloom.privacy.sum_record import SumRecord

SAVED_STATES = 3  # that a party keeps: a resumed run may need the one before the last
# Seconds before a party tries again to reach the coordinator; the pause doubles each time.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 0.5
REFUSED_SECONDS = 10.0  # after which a party gives up on a coordinator that refuses it
CONTROL_LIMIT = 2**18  # bytes of a control order besides what the agreement has
ENCODING_LIMIT = 2**24  # bytes of a fitted encoding in an order
ERROR_LENGTH = 1000  # characters of an error message that the coordinator receives

LOCAL_SECONDS = 10.0  # of the Local baseline's training in one order, at most
SECOND_PROCESS = "second_process"  # in an order: two processes take part as this party
HISTORY = "history.jsonl"  # the party's own scores, in the folder of a run's states

Log = Callable[[str], None]  # called with a line for each event
OnScores = Callable[[dict[str, Any]], None]  # called with a round and its scores


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
        refusal: Why the coordinator refuses the party; empty if it does not.
        complaints: Why the party did not begin a run, and what else its user must know.
        instance: The id of this process.
        keyring: The keys of all parties, as far as this party knows them.

    Args:
        agreement: The party's own copy of the agreement.
        name: The party's name.
        key: The party's key.
        graph: The party's graph; a `RawGraph` if the agreement declares raw columns.
        folder: Where the party saves its states and, at the end, its model.
        baseline: Whether the party computes its Local baseline after the rounds.
        on_scores: Called with the party's own scores in each evaluation.
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
        *,
        baseline: bool = False,
        on_scores: OnScores = lambda row: None,
    ):
        if name not in agreement.parties:
            raise unknown("party", name, agreement.parties)
        self.agreement, self.name, self.key = agreement, name, key
        self._memory = KeyMemory(folder / MEMORY_FILE)
        self.read_keys()
        self.graph, self.folder, self.tell_errors = graph, folder, tell_errors
        self._raw = graph  # before it is encoded
        self.agreed = agreement.agreed()
        self.status, self.on_scores = "", on_scores
        self.refusal, self.complaints = "", list[str]()
        self.instance = secrets.token_hex(8)  # tells this process from another one with the key
        self._told = False  # whether the user knows that there is another one
        self._wants_baseline = baseline
        self._local: LocalBaseline | None = None
        self._lineage = ""  # the id of the run, the same through every resume
        self._session = _Session("")  # the session that has begun the current run
        self._next = _Session("")  # a session that has said hello since
        self._to_restore = ""  # the state to restore before the first order of a round
        self._method: Method | None = None
        self._client: Client | None = None
        self._fit_client: Client | None = None  # that takes part in the fit of the encoding
        self._local_client: Client | None = None  # that adds the Local score to a sum
        self._record: SumRecord | None = None  # of the run's secure sums
        self._restarted = False  # whether the party's process began during the run
        self._round = 0  # of the phase that is executed
        self._stage = ""  # whose best evaluation is the result of the run
        self._history: OwnHistory | None = None

    @property
    def model(self) -> Path:
        """The file that holds the party's best model when the run has ended."""
        return self.folder / "model.safetensors"

    @property
    def final_model(self) -> Path:
        """The file that holds the party's model of the last round."""
        return self.folder / "final-model.safetensors"

    @property
    def errors(self) -> Path:
        """The log of the errors whose messages the coordinator does not receive."""
        return self.folder / "errors.log"

    def read_keys(self) -> None:
        """Reads the files of rotations and of revoked keys in the agreement's folder.

        Raises ConfigError if this party's own key does not count any more.
        """
        known = self.agreement.read_keyring().with_successors([self.key.public])
        self.keyring = self._memory.recall(known)
        self.keyring.require_own(self.name, self.key.public)

    def answer(self, data: bytes) -> bytes:
        """Executes an order. Takes its envelope, returns the envelope of the answer.

        Raises EnvelopeError unless it is a current order of the coordinator to this party.
        """
        header, body = open_order(data, self.name, self.keyring.coordinator)
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
        before = {
            "fedloom_hello": self._hello,
            "fedloom_refuse": self._end_refused,
            "fedloom_fit": self._begin_fit,
            "fedloom_begin": self._begin,
        }
        during = {
            "fedloom_keys": self._take_keys,
            "fedloom_keep": self._save_state,
            "fedloom_restore": self._restore,
            "fedloom_local": self._train_alone,
            "fedloom_best": self._keep_model,
            "fedloom_finish": self._finish,
        }
        try:
            if header.phase in before:
                return self._as_json(before[header.phase](self._read_order(body), session))
            if session is not self._session:
                raise LostStateError(f"party {self.name!r} has not begun this run")
            if header.phase in during:
                return self._as_json(during[header.phase](self._read_order(body)))
            return "answer", self._perform(header, body)
        except Exception as error:  # noqa: BLE001  (the coordinator receives it and decides)
            if header.phase in before:
                self.complaints.append(f"does not begin: {plain_text(error, ERROR_LENGTH)}")
            return self._failure(error)

    def _read_order(self, body: bytes) -> dict[str, Any]:
        """Returns the content of a control order. Notes if another process is the same party.

        Raises MessageError if the order is too long.
        """
        known = len(json.dumps(self.agreed))  # which names all parties
        limit = CONTROL_LIMIT + 8 * known  # the order has their keys, too
        limit += ENCODING_LIMIT if self.agreement.encoding is not None else 0
        if len(body) > limit:
            raise MessageError(f"the order has {len(body)} bytes, more than the limit of {limit}")
        order: dict[str, Any] = json.loads(body)
        if order.pop(SECOND_PROCESS, False) is True and not self._told:
            self._told = True
            self.complaints.append(
                f"another process takes part as party {self.name!r}, with the same key; end one "
                "of the two: the coordinator hears now one, now the other"
            )
        return order

    def _as_json(self, reply: dict[str, Any]) -> tuple[Kind, bytes]:
        """Returns the answer to a control order. It names the process, so that two are noticed."""
        return "answer", json.dumps({**reply, "instance": self.instance}).encode()

    def _failure(self, error: Exception) -> tuple[Kind, bytes]:
        """Returns the answer of a party that could not execute an order."""
        kind, text = type(error).__name__, str(error)
        if not isinstance(error, FedloomError) and not self.tell_errors:
            text = f"the message stays with the party, {self._log_error(error)}"
        content = {
            "cause": plain_text(f"{kind}: {text}", ERROR_LENGTH),
            "instance": self.instance,
            "lost_state": isinstance(error, LostStateError),
        }
        return "error", json.dumps(content).encode()

    def _log_error(self, error: Exception) -> str:
        """Writes an error to the party's own log. Returns where it is, in words."""
        entry = f"as error {secrets.token_hex(4)}"
        try:
            make_private(self.folder)
            with open(self.errors, "a", encoding="utf-8", opener=open_private) as log:
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

    def _end_refused(self, order: dict[str, Any], session: _Session) -> dict[str, Any]:
        if self._client is None and self._fit_client is None:
            self.refusal = plain_text(order["cause"], ERROR_LENGTH)
        return {}

    def _require_current(self, order: dict[str, Any], session: _Session) -> None:
        """Raises unless the order contains the party's nonce and what the party has agreed to."""
        if not session.nonce or order["nonce"] != session.nonce:
            raise MessageError("the nonce is not the one that the party has drawn: an old order")
        session.nonce = ""
        if found := differences(self.agreed, order["agreed"]):
            raise ConfigError(
                f"party {self.name!r} has agreed to something else: {'; '.join(found)}"
            )
        self._take_keys(order)

    def _take_keys(self, order: dict[str, Any]) -> dict[str, Any]:
        """Takes over the coordinator's keys. Raises ConfigError if some do not count."""
        self.keyring = self.keyring.received(order.get("keys"))
        self._memory.keep(self.keyring)
        return {}

    def _begin_fit(self, order: dict[str, Any], session: _Session) -> dict[str, Any]:
        self._require_current(order, session)
        if self.agreement.encoding is None:
            raise ConfigError(f"party {self.name!r}: no raw columns are agreed")
        facts, inductive = fit_facts(self.agreement), self.agreement.data.inductive
        responder = self._responder(facts, "-fit")
        self._fit_client = Client(self.name, self._raw, facts, inductive, responder)
        self._session = session
        self._method = self._client = None  # the run that was, if any, is over
        return {}

    def _signing_keys(self) -> dict[str, Ed25519PublicKey]:
        return {name: key.signing for name, key in self.keyring.current().items()}

    def _responder(self, facts: Facts, program: str = "") -> Responder:
        """Returns how the party answers: with its own keys, and its record of secure sums.

        Args:
            facts: The facts of the run, or of another program.
            program: The program, if it is not the run itself. Its sums have their own record.
        """
        if facts.secure is None:
            return responder_for(facts, self.name)
        digest = self.agreement.digest()
        identity = Identity(self.name, self.key.signing, self._signing_keys, digest)
        path = self.folder / "sums" / f"{digest.hex()[:32]}{program}.jsonl"
        record = SumRecord(path, facts.secure.apart)
        if program:
            record.rewind(-1)
        else:
            self._record = record
        return responder_for(facts, self.name, identity, record)

    def _encode(self, order: dict[str, Any]) -> None:
        """Encodes the party's table, if raw columns are agreed, and keeps the encoding."""
        if self.agreement.encoding is None:
            return
        encoding = Encoding.from_json(order["encoding"])
        with self._private_errors():
            self.graph = encoded(self._raw, encoding, self.agreement.encoding, self.name)
        make_private(self.folder)
        write_atomic(self.folder / ENCODING_FILE, (encoding.to_json() + "\n").encode())

    @contextmanager
    def _private_errors(self) -> Iterator[None]:
        """Keeps the text of errors about the party's tables, which name cells, with the party."""
        try:
            yield
        except DataError as error:
            raise ValueError(str(error)) from error

    def _begin(self, order: dict[str, Any], session: _Session) -> dict[str, Any]:
        self._require_current(order, session)
        self._encode(order)
        facts = self._own_facts(order["facts"])
        torch.set_num_threads(self.agreement.run.threads)
        lineage = _file_name(order, "lineage")
        if lineage != self._lineage:
            self._local = None  # of another run
        self._method, self._lineage = observed(self.agreement.make_method(), self._note), lineage
        self._history = OwnHistory(self._state_folder() / HISTORY)
        self._session = session
        inductive = self.agreement.data.inductive
        fresh, self._restarted = self._client is None, False
        self._client = Client(self.name, self.graph, facts, inductive, self._responder(facts))
        self._fit_client = self._local_client = None
        self._client.deployed = True
        # A party that was restarted during a run continues from its last saved state.
        self._to_restore = self._latest_state() if order["rejoin"] else ""
        # Its user has restarted it, and not the coordinator: it need not repeat its last sums.
        self._restarted = fresh and order["rejoin"] is True
        if self._record is not None:
            self._record.rewind(math.inf if self._restarted else -1)
        return {}

    def _own_facts(self, said: object) -> Facts:
        """Returns the facts that follow from the party's own copy of the agreement.

        Raises ConfigError if they do not match its graph, or if the coordinator says otherwise.

        said: the coordinator's facts, as JSON.
        """
        encoding = self.graph.encoding if self.agreement.encoding is not None else None
        facts = self.agreement.facts(self.agreement.roster({}, encoding))
        of_graph = (self.graph.num_features, self.graph.num_classes, self.graph.task)
        if (facts.num_features, facts.num_classes, facts.task) != of_graph:
            raise ConfigError(f"party {self.name!r}: the agreed facts do not match its graph")
        theirs = said if isinstance(said, dict) else {}
        if found := differences(_as_sent(facts_to_json(facts)), theirs):
            raise ConfigError(
                f"party {self.name!r}: the coordinator's facts are not as agreed: "
                f"{'; '.join(found)}"
            )
        return facts

    def _perform(self, header: Header, body: bytes) -> bytes:
        if header.phase.startswith(FIT_PROGRAM):
            return self._perform_in_fit(header, body)
        if header.phase.startswith(LOCAL_PROGRAM):
            return self._perform_in_local_sum(header, body)
        method, client = self._ready()
        if self._to_restore and header.round > 0:
            self._load(self._to_restore, rewind=not self._restarted)
        self._round = header.round
        message = decode(body, header.phase, message_limit(client.facts))
        _require_phase(method, client, header.phase, message, self.agreement.method)
        return encode(client.perform(method, header.phase, message), header.phase)

    def _perform_in_fit(self, header: Header, body: bytes) -> bytes:
        """Executes a phase of the fit of the encoding."""
        if self._fit_client is None:
            raise LostStateError(f"party {self.name!r} has not begun the fit of the encoding")
        method, phase = fit_method(self.agreement), header.phase.removeprefix(FIT_PROGRAM)
        message = decode(body, header.phase, message_limit(self._fit_client.facts))
        _require_phase(method, self._fit_client, phase, message, "fit of the encoding")
        with self._private_errors():
            reply = self._fit_client.perform(method, phase, message)
        return encode(reply, header.phase)

    def _note(self, reply: Message) -> None:
        """Notes the party's own scores in an evaluation."""
        assert self._history is not None
        row = {"round": self._round, **scores_of(reply, self.agreement.run.selection)}
        self._history.add(row)
        self.on_scores(row)

    # ---- the Local baseline ----
    def _train_alone(self, order: dict[str, Any]) -> dict[str, Any]:
        method, client = self._ready()
        if not self._wants_baseline:
            return {"declined": True, "done": False}
        done = self._baseline(method, client).train(min(float(order["seconds"]), LOCAL_SECONDS))
        return {"declined": False, "done": done}

    def _baseline(self, method: Method, client: Client) -> LocalBaseline:
        if self._local is None:
            self._local = LocalBaseline(
                self.name,
                self.graph,
                client.facts,
                method,
                self.agreement.run,
                self.agreement.data.inductive,
            )
        return self._local

    def _write_scores(self, scores: dict[str, Any]) -> None:
        make_private(self.folder)
        write_atomic(self.folder / "scores.json", (json.dumps(scores, indent=1) + "\n").encode())

    def _perform_in_local_sum(self, header: Header, body: bytes) -> bytes:
        """Executes a stage of the sum of all parties' Local scores."""
        _, client = self._ready()
        if self._local is None or not self._local.done:
            raise Refusal(f"party {self.name!r} has no Local baseline")
        if self._local_client is None:
            facts = client.facts
            responder = self._responder(facts, "-local")
            self._local_client = Client(self.name, self.graph, facts, False, responder)
            self._local_client.memory["local"] = self._local.summand
        method, phase = LocalScores(), header.phase.removeprefix(LOCAL_PROGRAM)
        message = decode(body, header.phase, message_limit(self._local_client.facts))
        _require_phase(method, self._local_client, phase, message, "Local scores")
        return encode(self._local_client.perform(method, phase, message), header.phase)

    def conclude(self) -> str:
        """Ends the Local baseline and writes the party's scores.json. Returns a line about both.

        Call it when the run has ended. The line is empty if there is nothing to compare.
        """
        if self._method is None or self._client is None or self._history is None:
            return ""
        metric = self.agreement.run.selection
        scores: dict[str, Any] = {
            "party": self.name,
            "status": self.status,
            "selection": metric,
            "class_names": list(self.graph.classes),
            "federated": self._history.best(self._stage, metric),
            "local": None,
            "history": self._history.rows,
        }
        self._write_scores(scores)
        if not self._wants_baseline:
            return ""
        baseline = self._baseline(self._method, self._client)
        baseline.train(math.inf)
        scores["local"] = baseline.scores
        self._write_scores(scores)
        return gain(scores["federated"], scores["local"], metric, f"test items of {self.name}")

    def _save_state(self, order: dict[str, Any]) -> dict[str, Any]:
        _, client = self._ready()
        path = self._state_folder() / f"{_file_name(order, 'mark')}.safetensors"
        make_private(path.parent)
        about = {"round": self._round}
        write_atomic(path, checkpoint.encode(checkpoint.Checkpoint(about, client.snapshot())))
        for old in self._saved_states()[:-SAVED_STATES]:
            old.unlink()
        return {}

    def _restore(self, order: dict[str, Any]) -> dict[str, Any]:
        self._load(_file_name(order, "mark"), rewind=True)
        return {}

    def _load(self, mark: str, rewind: bool) -> None:
        """Restores a saved state.

        rewind: whether sums after that state must be repeated before any others.
        """
        _, client = self._ready()
        path = self._state_folder() / f"{mark}.safetensors"
        if not path.exists():
            raise DataError(f"party {self.name!r} has no saved state {mark}")
        saved = checkpoint.decode(path.read_bytes())
        client.restore(saved.state)
        if self._record is not None and rewind:
            self._record.rewind(int(saved.about.get("round", 0)))
        self._to_restore = ""

    def _finish(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._method is not None and self._client is not None:
            stage, number = plain_text(order.get("stage", "")), order.get("round")
            self._write_model(self.model, "best", self._client.kept.get(stage, {}), stage, number)
            last = self._client.predictor(self._method)
            self._write_model(self.final_model, "final", last, stage, None)
            self._stage = stage
        self.status = plain_text(order["status"]) or "over"
        return {}

    def _keep_model(self, order: dict[str, Any]) -> dict[str, Any]:
        method, client = self._ready()
        stage = order.get("stage")
        if not isinstance(stage, str) or not stage or "/" in stage:
            raise MessageError("stage is not a text without '/'")
        client.keep(method, stage)
        if self._history is not None:
            self._history.mark_best(stage)
        return {}

    def _write_model(
        self, path: Path, which: str, tensors: Message, stage: str, number: int | None
    ) -> None:
        """Writes a model to the party's folder, if there is one."""
        method, client = self._ready()
        if not tensors:
            return
        card = ModelCard.of(
            method,
            self.agreement.method_path,
            client.facts,
            self.name,
            which,
            number,
            stage,
            self.graph.class_names,
            self.graph.feature_names,
            encoding=self.graph.encoding,
        )
        make_private(self.folder)
        write_atomic(path, model_bytes(card, tensors))

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


def _require_phase(
    method: Method, client: Client, name: str, message: Message, called: str
) -> None:
    """Raises MessageError unless a phase of the method, or of secure sums, takes the message.

    called: the method's name in the error message.
    """
    phase, plain = phases_of(type(method)).get(name), client.facts.secure is None
    if phase is None and (plain or hasattr(method, name)):
        raise MessageError(f"{name!r} is not a phase of method {called!r}")
    if phase is not None and plain:
        phase.require_names(message, f"to party {client.name!r}")


def _file_name(order: dict[str, Any], key: str) -> str:
    """Returns a value of an order that becomes the name of a file or folder."""
    word = order[key]
    if not isinstance(word, str) or not word.isascii() or not word.isalnum() or len(word) > 64:
        raise MessageError(f"{key} is not 1 to 64 letters and digits")
    return word


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """Returns the facts as JSON."""
    content = {f.name: getattr(facts, f.name) for f in fields(Facts)}
    terms = {
        "secure": facts.secure and asdict(facts.secure),
        "privacy": facts.privacy and asdict(facts.privacy),
    }
    lists = {"clients": list(facts.clients), "models": list(facts.models)}
    # Adversaries are simulated by the server, or by clients in its own process.
    return {**content, **lists, **terms, "adversary": None}


def _as_sent(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a JSON object as a receiver reads it."""
    sent: dict[str, Any] = json.loads(json.dumps(content))
    return sent


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
                    party.read_keys()
                    transport.connect()
                    connected, pause = True, FIRST_PAUSE
                    log(f"connected to {federation.address}")
                _answer_one(party, transport, log)
                _require_accepted(party, log)
                lost = None
            except (UnreachableError, RefusedError) as error:
                if connected:
                    log(f"lost the coordinator ({plain_text(error)}); waiting for it")
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
                _require_accepted(party, log)
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


def _require_accepted(party: Party, log: Log) -> None:
    """Logs why the party did not begin. Raises ConfigError if the coordinator refuses the party."""
    while party.complaints:
        log(party.complaints.pop(0))
    if party.refusal:
        raise ConfigError(f"the coordinator refuses party {party.name!r}: it {party.refusal}")
