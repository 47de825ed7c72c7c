"""The two kinds of party: Client, what a phase may see, and Server, what `run` may see. All between them passes `Server.exchange`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fedloom import learn, models, task
from fedloom.errors import ConfigError, MessageError, RoundFailed, unknown
from fedloom.faults import SILENT, Attendance, Held, Patience, listed, too_few
from fedloom.graph import Graph
from fedloom.ledger import MEASURING, Ledger
from fedloom.message import Absent, Batch, Message, Schema, check, check_schema, flatten, require_finite, travels, tree_map, unflatten
from fedloom.method import expected_letters, expected_reply, model_schema, require_names
from fedloom.models import Model
from fedloom.privacy import masked, sealed
from fedloom.privacy.sealed import Postbox
from fedloom.privacy.secure_sum import Member, Terms

if TYPE_CHECKING:
    from fedloom.method import Method

MOST = 2.0**53  # a client's weight in a mean: what can be counted one by one
SUMMED_FROM = 4096  # bytes of a tensor from which on its fingerprint is taken of sums
Weights = Mapping[str, Tensor]  # a number per client
Call = Callable[[str, dict[str, Message]], Mapping[str, Message | Absent]]  # an engine: phase's name, {client: message} -> {client: reply}
Expected = Callable[[str, Message], Schema]  # (client, its reply) -> what the reply must look like


@dataclass(frozen=True)
class Facts:
    """What every party knows before training: sizes, the task, and which model each client runs. Nothing about anybody's data."""

    num_features: int
    num_classes: int
    task: str
    clients: tuple[str, ...]
    models: tuple[str, ...]  # one spec per client, e.g. "gcn-2x64"
    dropout: float = 0.5
    seed: int = 0
    auc: bool = False  # whether evaluation computes areas under the ROC curve
    secure: Terms | None = None  # what clients insist on in secure sums; None: replies travel as they are

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.clients)

    @cached_property
    def model_of(self) -> dict[str, str]:
        """Which model each client runs."""
        return dict(zip(self.clients, self.models, strict=True))

    @property
    def width(self) -> int:
        """Embedding width p, the same for every client's model."""
        return models.parse(self.models[0]).width

    def build(self, spec: str, *stream: object) -> Model:
        """A model of this federation's task, initialised from a random stream of its own."""
        seed = learn.stream_seed(self.seed, "model", *stream)
        return models.build(spec, self.num_features, self.num_classes, self.task, dropout=self.dropout, seed=seed)  # type: ignore[arg-type]


class Client:
    """One party's side: its graph, its state, its own random streams.

    graph: what training may see: labels outside the training set are -1 and, in an inductive federation, the items are absent.
    full_graph: everything it holds, for evaluation. state: what survives between phases: tensors, models, optimisers, by name.
    memory: whatever else a phase keeps for a later one. It is never written down: what is done before the round loop is done again when
    a run is resumed, and that must bring it back.
    """

    def __init__(self, name: str, graph: Graph, facts: Facts, inductive: bool = False):
        self.name, self.facts = name, facts
        self.full_graph, self.inductive = graph, inductive
        self.graph = graph.training_view(inductive)
        self.state: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.streams: dict[str, torch.Generator] = {}
        self.member: Member | None = None  # its side of the secure sum under way; secrets are no state, they are never written down
        self.postbox: Postbox | None = None  # its keys for letters to other clients, in a secure run
        self._batches: tuple[Graph | None, int, list[Graph]] = (None, 0, [])

    def build(self, purpose: str = "init") -> Model:
        """A fresh model of this client's architecture, from its own random stream."""
        return self.facts.build(self.facts.model_of[self.name], self.name, purpose)

    def rng(self, purpose: str) -> torch.Generator:
        """The client's own random stream for a purpose; it goes on where it stopped."""
        return _stream(self.streams, self.facts.seed, "client", self.name, purpose)

    def snapshot(self) -> Message:
        """Everything of it that a later round depends on, as tensors."""
        kept: Message = snapshot({"state": self.state, "streams": self.streams})
        return kept

    def restore(self, saved: Message) -> None:
        """Puts it back to a snapshot; it must have been set up before."""
        restore(self.state, saved.get("state", {}))
        for purpose, state in saved.get("streams", {}).items():
            self.rng(purpose).set_state(state)

    def loss(self, logits: Tensor, batch: Graph, reduction: str = "mean", of_class: Tensor | None = None) -> Tensor:
        """Cross-entropy of logits [items, classes] over the training items of a batch; 0 if it has none. of_class: class weights."""
        return task.training_loss(logits, batch, reduction, of_class)

    @torch.no_grad()
    def validate(self, net: Model) -> float | None:
        """A model's accuracy on the client's validation items, None without any: to choose a model by, never to train on."""
        graph = self.full_graph
        right = net(graph)[graph.val].argmax(1) == graph.y[graph.val]
        return right.float().mean().item() if len(right) else None

    def batches(self, size: int) -> list[Graph]:
        """What one epoch sees: the whole graph in a node task; in a graph task the training graphs, `size` at a time (0 = all).

        Which graphs share a batch is drawn once, so that a batch's adjacency is normalised once; epochs differ in the order.
        """
        of_graph, of_size, batches = self._batches
        if of_graph is self.graph and of_size == size:
            return batches
        if self.graph.task == "node":
            batches = [self.graph] if self.graph.train.any() else []  # Adam would scale the bare L2 penalty up to full steps
        else:
            items = self.graph.train.nonzero().flatten()
            rng = torch.Generator().manual_seed(learn.stream_seed(self.facts.seed, "client", self.name, "batches"))
            chunks = items[torch.randperm(len(items), generator=rng)].split(size or max(len(items), 1)) if len(items) else ()
            batches = [self.graph.select_items(chunk) for chunk in chunks]
        self._batches = (self.graph, size, batches)
        return batches

    def shuffled(self, size: int) -> list[Graph]:
        """The batches of one epoch in a fresh random order."""
        batches = self.batches(size)
        return batches if len(batches) < 2 else [batches[k] for k in torch.randperm(len(batches), generator=self.rng("order"))]


def perform(method: Method, client: Client, phase: str, message: Message) -> Message:
    """Runs a phase at a client: what every engine calls, wherever the client is."""
    if client.facts.secure is not None:
        return masked.answer(method, client, phase, message)
    return getattr(method, phase)(client, **message)


def _stream(streams: dict[str, torch.Generator], *names: object) -> torch.Generator:
    purpose = str(names[-1])
    if purpose not in streams:
        streams[purpose] = torch.Generator().manual_seed(learn.stream_seed(*names))
    return streams[purpose]


class Replies(Mapping[str, Message]):
    """What came back: a message per client that answered, in client order."""

    def __init__(self, messages: Mapping[str, Message]):
        self.messages = messages

    def __getitem__(self, client: str) -> Message:
        return self.messages[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    def column(self, name: str) -> dict[str, Any]:
        """{client: what it sent under `name`}."""
        return {client: message[name] for client, message in self.items()}

    def stack(self, name: str) -> Tensor:
        """The clients' tensors of that name, stacked along a new first axis."""
        if isinstance(self.messages, Batch):
            return self.messages.stacks[name].clone()
        return torch.stack(list(self.column(name).values()))

    def sum(self) -> Message:
        """The sum of all messages, name by name, added in client order."""
        if not self:
            raise MessageError("nobody answered: there is nothing to add up")
        if isinstance(self.messages, Batch):
            return unflatten({name: stack.sum(0, dtype=stack.dtype) for name, stack in self.messages.stacks.items()})
        first, *rest = self.values()
        total = tree_map(torch.clone, first)
        for message in rest:
            tree_map(Tensor.add_, total, message)
        return total

    def mean(self, weight: Weights | None = None) -> Message:
        """Σ_k w_k · message_k with w_k = weight_k / Σ weight (all equal if none are given)."""
        share = self.shares(weight)
        if isinstance(self.messages, Batch):
            by = torch.tensor(list(share.values()))
            floats = {name: stack if stack.is_floating_point() else stack.float() for name, stack in self.messages.stacks.items()}
            return unflatten({name: torch.tensordot(by.to(stack.dtype), stack, 1) for name, stack in floats.items()})
        return Replies({c: tree_map(lambda t, w=share[c]: t * w, m) for c, m in self.items()}).sum()

    def shares(self, weight: Weights | None = None) -> dict[str, float]:
        """The answering clients' weights, scaled to sum to 1; refuses negative, non-finite and all-zero ones."""
        if not self:
            raise MessageError("nobody answered: there is nothing to average")
        raw = {c: 1.0 if weight is None else float(weight[c]) for c in self}
        for client, value in raw.items():
            _require_weight(client, value)
        total = sum(raw.values())
        if total <= 0:
            raise MessageError("weights: all clients that answered have weight 0")
        return {c: value / total for c, value in raw.items()}


def _require_weight(client: str, value: float) -> None:
    if not 0 <= value <= MOST:
        raise MessageError(f"client {client!r}: weight is {value}, must be finite, not negative and at most 2^53")


def _refuse_negative(client: str, reply: Message) -> None:
    """Refuses a weight below 0; one that is a vector may have such entries."""
    for weight in flatten(reply).values():
        if weight.dim() == 0:
            _require_weight(client, float(weight))


class Observer(Protocol):
    """What a run keeps of what happens; see `fedloom.runs.Recorder`."""

    def entered_rounds(self, server: Server, count: int) -> int:
        """Called when the round loop starts; gives the number of rounds that are done already (after a resume)."""

    def finished_round(self, server: Server) -> bool:
        """Called after each round; True stops the loop."""

    def evaluated(self, server: Server, replies: Replies, stage: str) -> None:
        """Called with every client's scores."""

    def evaluated_in_sum(self, server: Server, total: Message, stage: str) -> None:
        """Called, in a secure run, with the sum over the clients' scores."""


@dataclass(frozen=True)
class Rules:
    """How rounds are run: which model to evaluate, share of clients that take part, how often to evaluate, what absence is borne.

    retries: how often those who have not answered are asked again, if too few have, before the run fails.
    """

    evaluation: str
    participation: float = 1.0
    evaluate_every: int = 1
    patience: Patience = Patience()
    retries: int = 2


class Server:
    """The coordinator's side: public facts, its own state and random streams, and questions to clients. Never a graph."""

    def __init__(self, method: Method, facts: Facts, call: Call, rules: Rules, observer: Observer):
        self.facts, self.clients = facts, facts.clients
        self.state: dict[str, Any] = {}
        self.streams: dict[str, torch.Generator] = {}
        self.round = 0  # 0 = before the first
        self.participants: Sequence[str] = self.clients
        self.ledger = Ledger()
        self.history_hash = hashlib.sha256(b"fedloom").digest()
        self._method, self._call, self._rules, self._observer = method, call, rules, observer
        self._last_round = False
        self.in_round, self.over = False, False  # over: the observer wants no further round
        self.seconds_evaluating = 0.0
        self.notes: dict[str, float] = {}  # what a method wants in the run's summary
        self.keys_met = False  # whether the clients have each other's keys for letters, in a secure run
        self.attendance = Attendance()
        self._model_before: Any = None  # the model when the round began, for a round that fails

    # ---- what run may ask for ----
    def rng(self, purpose: str) -> torch.Generator:
        """The server's own random stream for a purpose."""
        return _stream(self.streams, self.facts.seed, "server", purpose)

    def model(self) -> Message:
        """Initial weights of the model that all clients run."""
        different = sorted(set(self.facts.models))
        if len(different) > 1:
            raise ConfigError(f"model: this method needs one model for all clients, got {', '.join(different)}")
        return learn.weights(self.facts.build(different[0], "server"))

    def rounds(self, count: int) -> Iterator[int]:
        """Numbers the rounds 1..count and draws who takes part in each. What must outlive a round belongs in `state`."""
        if self.round:
            raise RuntimeError("rounds: a run has one round loop; what comes before or after it is asked outside")
        self.round = done = self._observer.entered_rounds(self, count)
        if done:
            self.attendance.report()  # what is done again after a resume is in the history already
        for number in range(done + 1, (done if self.over else count) + 1):
            self.round, self._last_round = number, number == count
            self.participants, self.in_round = self._draw(), True
            self._begin_round()
            yield number
            self.in_round = False
            if self._observer.finished_round(self):
                break
        self.participants = self.clients
        self._begin_round()  # what comes after the rounds is done whole, too

    def ask(
        self, phase: Any, *, clients: Sequence[str] | None = None, each: Mapping[str, Message] | None = None, **message: Any
    ) -> Replies:
        """Sends a message to clients, runs a phase there, gives what came back.

        phase: one of the method's phases. clients: whom to ask (this round's participants). each: what to send to each client
        on top of what all get (then its keys say whom to ask). message: what all get.
        """
        return self._ask(phase, clients, each, message)

    def _ask(
        self, phase: Any, clients: Sequence[str] | None, each: Mapping[str, Message] | None, message: Message, needed: int | None = None,
        refuse: Callable[[str, Message], None] = lambda client, reply: None,
    ) -> Replies:  # fmt: skip
        """`ask`, with another number of clients that must answer, and with a check of what they say beside that of its form."""
        name = phase.__name__
        if hasattr(phase, "read_by"):
            raise ConfigError(f"server.ask: phase {name!r} writes letters to other clients; use server.relay")
        if self.facts.secure is not None and phase.reply:
            raise ConfigError(
                f"run.secure: this method asks for every client's own answer to {name!r}; a secure run gives sums only "
                "(phases marked @summed or @averaged, as in fedavg and fedsgd)"
            )
        messages = self._address(phase, clients, each, message)

        def expected(client: str, reply: Message) -> Schema:
            refuse(client, reply)
            return self._reply_of(phase, messages[client], client, reply)

        replies = self.exchange(name, messages, expected, alike=not phase.sized_by_reply, needed=needed)
        self.remember(name, messages, replies)
        return replies

    def sum(
        self, phase: Any, *, clients: Sequence[str] | None = None, each: Mapping[str, Message] | None = None, **message: Any
    ) -> Message:
        """`ask` for methods that need nothing but the sum of the replies; `phase` is marked `@summed`."""
        _require_aggregate(phase, "sum")
        if self.facts.secure is not None:
            return self._secure_total(phase, clients, each, message)
        return self.ask(phase, clients=clients, each=each, **message).sum()

    def mean(
        self, phase: Any, *, clients: Sequence[str] | None = None, each: Mapping[str, Message] | None = None, **message: Any
    ) -> Message:
        """`ask` for methods that need nothing but the mean of the replies; `phase` is marked `@averaged`, which says by what weights."""
        _require_aggregate(phase, "mean")
        if self.facts.secure is not None:
            return self._secure_total(phase, clients, each, message)
        if phase.by is None:
            return self.ask(phase, clients=clients, each=each, **message).mean()
        weight = self.weights(phase.by, list(each) if each is not None else self.participants if clients is None else clients)
        each = None if each is None else {c: each[c] for c in weight}
        return self.ask(phase, clients=list(weight), each=each, **message).mean(weight)

    def relay(self, phase: Any, *, book_as: str | None = None, **message: Any) -> None:
        """Client to client: everybody writes its letters in `phase`, which is marked `@letters`, and reads those to it in `read_by`.

        book_as: the phase for whose sake they travel, if that is another (the ledger counts evaluation apart).
        """
        self.deliver(phase, self.collect(phase, book_as=book_as, **message), book_as=book_as)

    def collect(self, phase: Any, *, book_as: str | None = None, **message: Any) -> Replies:
        """The letters {sender: {receiver: letter}} that clients write in a phase marked `@letters`."""
        if not hasattr(phase, "read_by"):
            raise ConfigError(f"server.relay: phase {phase.__name__!r} is not marked @letters (docs/adding-a-method.md)")
        name, sealing = phase.__name__, self.facts.secure is not None and phase.sealed
        if sealing:
            sealed.introduce(self)
        messages = self._address(phase, self.clients, None, message)

        def expected(client: str, reply: Message) -> Schema:
            schema = expected_letters(self._method, phase, messages[client], reply, self.facts, client)
            return tuple((receiver, "uint8", (-1,)) for receiver in sorted(reply)) if sealing else schema

        written = self.exchange(name, messages, expected, book_as)
        if self.facts.secure is None and phase.sealed:
            self.remember(name, messages, written)
        else:  # what is encrypted is different every time; who writes to whom is not
            addressed = {c: {to: torch.zeros(0) for to in sorted(letters)} for c, letters in written.items() if letters}
            self.remember(name, messages, addressed)
        return written

    def deliver(self, phase: Any, written: Mapping[str, Message], *, book_as: str | None = None) -> None:
        """Hands every client the letters to it, {sender: letter}, in the phase that reads those of `phase`."""
        read = getattr(self._method, phase.read_by)
        arrived: dict[str, Message] = {client: {} for client in self.clients}
        for sender, letters in written.items():
            for receiver, letter in letters.items():
                arrived[receiver][sender] = letter
        messages = {client: {"letters": letters} if letters else {} for client, letters in arrived.items()}
        self.exchange(read.__name__, messages, lambda client, reply: (), book_as)

    def due(self, stage: str = "train") -> bool:
        """Whether `evaluate` would score now, in this round and stage."""
        return self._last_round or not self.in_round or stage != "train" or self.round % self._rules.evaluate_every == 0

    def evaluate(self, stage: str = "train", **common: Any) -> None:
        """Has every client score on its own held-out items; the run keeps the result.

        common: the shared model, sent along if the run evaluates shared models; else each client takes its own.
        """
        if not self.due(stage):
            return
        begun = time.perf_counter()
        sent = {} if self._rules.evaluation == "local" else common
        if self.facts.secure is None:
            self._observer.evaluated(self, self.ask(self._method.evaluate, clients=self.clients, **sent), stage)
        else:
            self._observer.evaluated_in_sum(self, self.sum(self._method.evaluate_sum, clients=self.clients, **sent), stage)
        self.seconds_evaluating += time.perf_counter() - begun

    # ---- how it does that ----
    def _address(
        self, phase: Any, clients: Sequence[str] | None, each: Mapping[str, Message] | None, message: Message
    ) -> dict[str, Message]:
        """{client: message} in client order, checked: known clients, finite numbers, and the names that the phase takes."""
        for content in (message, *(each or {}).values()):
            require_finite(content, f"to the clients in {phase.__name__!r}")
        wanted = set(each if each is not None else self.participants if clients is None else clients)
        for client in sorted(wanted - set(self.clients)):
            raise unknown("client", client, self.clients)
        messages = {c: message if each is None else {**message, **each[c]} for c in self.clients if c in wanted}
        for client, content in messages.items() if each is not None else list(messages.items())[:1]:  # the same for all
            require_names(phase, content, f"to client {client!r}")
        return messages

    def _reply_of(self, phase: Any, message: Message, client: str, reply: Message | None = None) -> Schema:
        return expected_reply(self._method, phase, message, model_schema(self.facts.model_of[client], self.facts), self.facts, reply)

    def exchange(
        self, name: str, messages: Mapping[str, Message], expected: Expected, book_as: str | None = None, alike: bool = False,
        needed: int | None = None,
    ) -> Replies:  # fmt: skip
        """Sends messages, gives what came back, each booked, and each reply held against the schema that is expected of it.

        With a quorum of 1, a client's error is raised, and a reply that is not as expected is an error. Below, either makes the client
        absent: if too few have answered, those who have not are asked again, and if that does not help, it is RoundFailed. What absence
        means for later exchanges is said in `Attendance`. Who is silent for no known reason is left out, with a quorum of 1, too.

        alike: what is expected depends on a client's model and on what it was sent, and on nothing else. needed: how many must answer, if
        not as many as the quorum and the method say.
        """
        answers: dict[str, Message] = {}
        absent: dict[str, Absent] = {}
        measuring = (book_as or name) in MEASURING
        needed = self._needed(name, len(messages)) if needed is None else needed
        due, known = dict(messages), set() if measuring else set(self.attendance.out)
        for attempt in range(self.attempts):
            self.attendance.asked_again += len(due) if attempt else 0
            present, away = self.present(due, measuring)
            came, lost = self._send(name, present, expected, book_as, alike)
            if isinstance(came, Batch):
                return Replies(came)
            answers |= came
            absent = {c: why for c, why in (absent | away | lost).items() if c not in answers}
            due = {c: messages[c] for c in messages if c in absent and c not in self.attendance.out}
            if len(answers) >= needed or not due:
                break
        self.attendance.note(name, {c: why for c, why in absent.items() if c not in known})
        if len(answers) < needed and self.survives:
            raise self.failed(name, too_few(answers, len(messages), needed), absent)
        self.conclude(name, messages, absent, book_as)
        return Replies({c: answers[c] for c in messages if c in answers})

    def stage(
        self, name: str, messages: Mapping[str, Message], expected: Expected, book_as: str | None, lost: dict[str, Absent]
    ) -> Replies:  # fmt: skip
        """`exchange` for one stage of several: nobody is asked twice, how many are enough and what follows is the caller's affair.

        lost: where those who are absent are entered.
        """
        came, absent = self._send(name, messages, expected, book_as)
        self.attendance.note(name, absent)
        lost |= absent
        return Replies(came)

    @property
    def survives(self) -> bool:
        """Whether the run goes on without somebody who does not answer."""
        return self._rules.patience.survives

    @property
    def attempts(self) -> int:
        """How often an exchange may be tried: once, if every absence is an error."""
        return 1 + self._rules.retries if self.survives else 1

    def _needed(self, name: str, asked: int) -> int:
        return max(self.least(name, asked), self._rules.patience.enough(asked))

    def least(self, name: str, asked: int) -> int:
        """How many of so many clients must answer a phase for the method to go on, whatever the quorum."""
        return asked if name in self._method.everybody else min(asked, self._method.minimum)

    def present(self, messages: Mapping[str, Message], measuring: bool) -> tuple[dict[str, Message], dict[str, Absent]]:
        """Of those who are to be asked: who can be, and why the others cannot. Hands in first what they have missed before the rounds."""
        kept = self.attendance
        known = {} if measuring else kept.out if self.round else kept.absent_before()
        absent = {c: why for c, why in known.items() if c in messages}
        for number, held in enumerate(kept.held):
            due = [c for c in messages if kept.lacks(c, number) and c not in absent]
            if not held.repeatable:
                absent |= dict.fromkeys(due, Absent(f"missed {held.name!r} before the rounds, which a secure run does not repeat"))
            elif due:
                lost = self._hand_in(number, due)
                absent |= {c: Absent(f"behind since {held.name!r}: {why.cause}", why.error) for c, why in lost.items()}
        return {c: message for c, message in messages.items() if c not in absent}, absent

    def _hand_in(self, number: int, clients: Sequence[str]) -> dict[str, Absent]:
        """Has clients do an exchange before the rounds that they have missed; gives who has failed again."""
        held = self.attendance.held[number]
        came, lost = self._send(held.name, {c: held.messages[c] for c in clients}, None, held.book_as)
        for client in came:
            self.attendance.caught_up(client, number)
        return lost

    def catch_up(self) -> None:
        """In a run that is resumed, before clients' states are put back: what they had made up for after set-up is made up for again."""
        for number, clients in list(self.attendance.to_catch_up()):
            self._hand_in(number, clients)
        self.attendance.put_back()

    def _send(
        self, name: str, messages: Mapping[str, Message], expected: Expected | None, book_as: str | None, alike: bool = False
    ) -> tuple[Mapping[str, Message], dict[str, Absent]]:  # fmt: skip
        """One try: the answers that are as expected, booked, and why there are no others. expected: None if nobody reads them."""
        self.ledger.book(self.round, name, "down", messages, book_as)
        given = self._call(name, dict(messages)) if messages else {}
        if isinstance(given, Batch) and alike and expected is not None and not self.survives:
            self._check_batch(name, given, messages, expected)
            self.ledger.book(self.round, name, "up", given, book_as)
            return given, {}
        answers: dict[str, Message] = {}
        absent: dict[str, Absent] = {}
        for client in messages:
            reply, who = given.get(client, SILENT), f"client {client!r} in {name!r}"
            if not isinstance(reply, Absent) and expected is not None:
                try:
                    check(reply, expected(client, reply), who)
                except MessageError as error:
                    if not self.survives:
                        raise
                    reply = Absent(f"refused: {str(error).removeprefix(who + ': ')}", error)
            if isinstance(reply, Absent):
                absent[client] = reply
            else:
                answers[client] = reply
        self.ledger.book(self.round, name, "up", answers, book_as)
        self._bear(name, absent, (book_as or name) in MEASURING)
        return answers, absent

    def _bear(self, name: str, absent: Mapping[str, Absent], measuring: bool) -> None:
        """With a quorum of 1, raises what keeps a client from answering; below, sees to those who have lost their state."""
        reasons = {c: why for c, why in absent.items() if why is not SILENT}
        if not self.survives:
            for error in (why.error for why in reasons.values() if why.error is not None):
                raise error
            if reasons:
                raise self.failed(name, "all clients are needed (run.quorum is 1)", reasons)
        for client, why in reasons.items():
            if why.forgot:
                self.attendance.forgot(client, why, self.round > 0, measuring)

    def conclude(
        self, name: str, messages: Mapping[str, Message], absent: Mapping[str, Absent], book_as: str | None, repeatable: bool = True
    ) -> None:  # fmt: skip
        """What follows from an exchange for those who were absent; repeatable: whether it can be handed in again to them."""
        if not self.survives or (book_as or name) in MEASURING:
            return
        if self.round:
            self.attendance.out |= absent
        else:
            self.attendance.hold(Held(name, messages, book_as, repeatable, dict(absent)))

    def failed(self, name: str, why: str, absent: Mapping[str, Absent]) -> RoundFailed:
        """The error of a round that cannot go on. The server's model is put back to what it was when the round began."""
        if self.in_round and self._model_before is not None:
            self.state["model"] = self._model_before
        when = f"round {self.round}" if self.round else "before round 1"
        return RoundFailed(f"{when}, {name!r}: {why}; absent: {listed(absent)}")

    def _begin_round(self) -> None:
        self.attendance.begin_round()
        model = self.state.get("model")
        self._model_before = snapshot(model) if isinstance(model, dict) and self.survives else None

    def _check_batch(self, name: str, batch: Batch, messages: Mapping[str, Message], expected: Expected) -> None:
        """`check` of many replies of which alike ones are expected."""
        kinds: dict[tuple[str, int], str] = {}
        for client in batch:
            kinds.setdefault((self.facts.model_of[client], id(messages[client])), client)
        for client in kinds.values():
            check_schema(batch.schema, expected(client, {}), f"client {client!r} in {name!r}")
        if not all(map(travels, batch.stacks.values())):
            for client, reply in batch.items():
                require_finite(reply, f"client {client!r} in {name!r}")

    def _secure_total(self, phase: Any, clients: Sequence[str] | None, each: Mapping[str, Message] | None, message: Message) -> Message:
        messages = self._address(phase, clients, each, message)
        if not messages:
            raise MessageError(f"nobody is asked for {phase.__name__!r}: there is nothing to add up")
        schemas = {self._reply_of(phase, content, client) for client, content in messages.items()}
        if any(-1 in shape for schema in schemas for _, _, shape in schema):
            raise ConfigError(f"run.secure: what clients answer to {phase.__name__!r} may have any length (n), it cannot be added up")
        if len(schemas) != 1:
            raise ConfigError(f"run.secure: the clients' answers to {phase.__name__!r} differ in shape, they cannot be added up")
        return masked.total(self, phase, messages, *schemas)

    def _draw(self) -> Sequence[str]:
        count = max(1, round(self._rules.participation * len(self.clients)))
        if count == len(self.clients):
            return self.clients
        chosen = torch.randperm(len(self.clients), generator=self.rng("participation"))[:count]
        return [self.clients[k] for k in sorted(chosen.tolist())]

    def weights(self, by: str, clients: Sequence[str]) -> dict[str, Tensor]:
        """What the clients answered to the phase `by`: each is asked until it answers, then it is kept. Who never has is left out."""
        known = self.state.setdefault("weights of means", {}).setdefault(by, {})  # a name that no method takes for its own
        unknown_yet = [c for c in clients if c not in known]
        if unknown_yet:
            needed = self._needed(by, len(clients)) - (len(clients) - len(unknown_yet))
            for client, reply in self._ask(getattr(self._method, by), unknown_yet, None, {}, needed, _refuse_negative).items():
                (known[client],) = reply.values()
        return {c: known[c] for c in clients if c in known}

    def remember(self, phase: str, messages: Mapping[str, Message], replies: Mapping[str, Message]) -> None:
        """Chains this exchange into the history hash: who, what, every byte of every tensor, both ways."""
        digests: dict[int, bytes] = {}  # a tensor that many are sent is hashed once, a message put into words once
        words: dict[int, list[bytes]] = {}
        chain = hashlib.sha256(self.history_hash + f"{self.round} {phase}".encode())
        for direction, side in (("down", messages), ("up", replies)):
            if isinstance(side, Replies) and isinstance(side.messages, Batch):
                for name, stack in side.messages.stacks.items():
                    chain.update(
                        f"{direction} {side.messages.clients} {name} {stack.dtype} {list(stack.shape)}".encode() + fingerprint(stack)
                    )
                continue
            for client, content in side.items():
                if id(content) not in words:
                    flat = flatten(content)
                    digests |= {id(t): fingerprint(t) for t in flat.values() if id(t) not in digests}
                    words[id(content)] = [f" {name} {t.dtype} {list(t.shape)}".encode() + digests[id(t)] for name, t in flat.items()]
                for told in words[id(content)]:
                    chain.update(f"{direction} {client}".encode() + told)
        self.history_hash = chain.digest()


def _require_aggregate(phase: Any, how: str) -> None:
    if getattr(phase, "aggregate", None) != how:
        mark = {"sum": "@summed", "mean": "@averaged"}[how]
        raise ConfigError(f"server.{how}: phase {phase.__name__!r} is not marked {mark} (docs/adding-a-method.md)")


def fingerprint(tensor: Tensor) -> bytes:
    """32 bytes that tell two tensors of one shape apart.

    Of a large one's 64-bit words, 64 to a row, the sums of all rows and of all columns are hashed: a few times quicker than all bytes, and
    other values or the same in another order change some of them. No proof against somebody who wants two runs to agree.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # a part of another tensor need not begin where a 64-bit word may
    if not len(flat):
        return hashlib.sha256(b"").digest()  # an empty tensor may have any stride
    raw = flat.view(torch.uint8)
    if len(raw) < SUMMED_FROM:
        return hashlib.sha256(raw.numpy().data).digest()
    whole = len(raw) // 512 * 512
    words = raw[:whole].view(torch.int64).view(-1, 64)  # sums are modulo 2^64
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in (words.sum(0), words.sum(1), raw[whole:]))).digest()


# ---- what survives: state as tensors ----
def snapshot(value: Any) -> Any:
    """A copy of a state (tensors, models, optimisers, random streams, in dicts) as a nested dict of tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: saved for key, v in value.items() if not _is_empty(saved := snapshot(v))}
    if isinstance(value, nn.Module):
        return snapshot(learn.weights(value))
    if isinstance(value, torch.optim.Optimizer):
        return snapshot({str(k): v for k, v in value.state_dict()["state"].items()})
    if isinstance(value, torch.Generator):
        return value.get_state()
    raise TypeError(f"state holds a {type(value).__name__}; valid: tensors, models, optimisers, random streams, dicts of these")


def _is_empty(saved: Any) -> bool:
    return isinstance(saved, dict) and not saved


def restore(value: Any, saved: Any) -> Any:
    """Brings a state back to a snapshot, in place where something live is there (an optimiser holds on to its tensors)."""
    if isinstance(value, nn.Module):
        learn.load_weights(value, saved)
    elif isinstance(value, torch.optim.Optimizer):
        blank = value.state_dict()
        value.load_state_dict({**blank, "state": {int(k): dict(v) for k, v in (saved or {}).items()}})
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, dict):
        for gone in [key for key in value if key not in saved and isinstance(value[key], Tensor)]:
            del value[gone]
        for key, kept in saved.items():
            value[key] = restore(value[key], kept) if key in value else kept
    elif isinstance(value, Tensor) and value.shape == saved.shape:
        with torch.no_grad():
            value.copy_(saved)
    else:
        return saved
    return value
