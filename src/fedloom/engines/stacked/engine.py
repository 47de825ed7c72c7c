"""The stacked engine: groups of clients run at once, on stacked models and graphs.

A phase that only asks for operations is recorded once for a whole group
(`fedloom.engines.stacked.recording`). Any other phase runs in lockstep: every client runs its own
code, and equal operations run as one (`fedloom.engines.stacked.lockstep`). Each client has its own
random numbers. Results equal the loop engine's up to rounding. docs/stacked.md explains it.

Groups run one after another. The activations of a group fit into the processor's cache.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

from torch import nn

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import Absent, Batch, Message, batched, isolate, joined_batches
from fedloom.core.method import Method
from fedloom.core.phase import phases_of
from fedloom.engines import loop
from fedloom.engines.base import Details
from fedloom.engines.stacked.group import Group
from fedloom.engines.stacked.group_operations import copied_models
from fedloom.engines.stacked.lockstep import run_lockstep
from fedloom.engines.stacked.operations import BATCHED
from fedloom.engines.stacked.parameters import unstack
from fedloom.engines.stacked.recording import record
from fedloom.engines.stacked.tensors import lazy_copies

# Activations of a training step of a group. Larger ones leave the processor's cache.
GROUP_BYTES = 32e6
# Parameters, gradients and moments of a group. Lockstep allocates some of them again.
GROUP_PARAMETER_BYTES = 512e6


class Engine(loop.Engine):
    """Runs groups of clients at once."""

    tolerates_failures: ClassVar[bool] = False  # a client that fails stops its group

    def __init__(
        self,
        method: Method,
        clients: Iterable[Client],
        policy: FaultPolicy = FaultPolicy(),
        workers: int = 0,
    ):
        super().__init__(method, clients, policy)
        nodes = {client.name: client.full_graph.num_nodes for client in self.clients.values()}
        found = groups(next(iter(self.clients.values())).facts, nodes) if self.clients else []
        self.groups = [part for names in found for part in self._by_training(names) if part]
        self.states = {names: Group(BATCHED) for names in self.groups}
        # By phase: how many calls ran "batched" and "single", and clients' phases "recorded".
        self.calls: dict[str, Counter[str]] = {}
        self.unrecorded: dict[str, str] = {}  # by phase: why it ran in lockstep

    def _by_training(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Yields the clients that have training items, and those that have none."""
        for trains in (True, False):
            yield tuple(n for n in names if bool(self.clients[n].graph.train.any()) is trains)

    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Runs the phase, group by group.

        Returns a `Batch` if all replies have the same schema.
        """
        batches: list[Batch] = []
        replies: dict[str, Message] = {}
        for names, whole in self.states.items():
            asked = tuple(name for name in names if name in messages)
            if not asked:
                continue
            group = whole if len(asked) == len(names) else whole.part(asked)
            group.calls = self.calls.setdefault(phase, Counter())
            batch = self._recorded(group, phase, names, asked, messages)
            if batch is not None:
                batches.append(batch)
            else:
                replies.update(self._lockstep(group, phase, asked, messages))
        if batches and not replies:
            only = batches[0]
            if len(batches) == 1 and only.stacks and only.clients == tuple(messages):
                return only
            if (joined := joined_batches(batches, list(messages))) is not None:
                return joined
        for batch in batches:
            replies.update(batch)
        ordered = {name: replies[name] for name in messages}
        return batched(ordered) or {name: isolate(reply) for name, reply in ordered.items()}

    def _recorded(
        self,
        group: Group,
        phase: str,
        names: Sequence[str],
        asked: Sequence[str],
        messages: Mapping[str, Message],
    ) -> Batch | None:
        """Runs the phase once for all clients of a group that are asked; None if it cannot.

        Args:
            group: The group of the clients that are asked.
            phase: The phase.
            names: All clients of the whole group.
            asked: Those that are asked.
            messages: The messages to all clients.
        """
        members = [self.clients[name] for name in names]
        known = phases_of(type(self.method)).get(phase)
        if known is None or not all(client.answers_plainly for client in members):
            return None
        sent = [messages[name] for name in asked]
        if all(message is sent[0] for message in sent):
            sent = [isolate(sent[0])] * len(sent)
        chosen = None
        if group is not group.whole:
            place = {name: k for k, name in enumerate(names)}
            chosen = [place[name] for name in asked]
        with group.whole.separated() if chosen else nullcontext():
            recording = record(group, members, chosen, self.method, known, sent)
            if isinstance(recording, str):
                self.unrecorded[phase] = recording
                return None
            group.calls["recorded"] += len(asked)
            replies = Batch(asked, recording.run())
            recording.release()
            return replies

    def _lockstep(
        self, group: Group, phase: str, asked: Sequence[str], messages: Mapping[str, Message]
    ) -> dict[str, Message]:
        """Runs the phase in lockstep."""
        received = delivered([messages[name] for name in asked])
        tasks = [
            partial(self.clients[name].perform, self.method, phase, sent)
            for name, sent in zip(asked, received, strict=True)
        ]
        with group.whole.separated():
            done = run_lockstep(tasks, group) if len(asked) > 1 else [task() for task in tasks]
        return dict(zip(asked, done, strict=True))

    def _hand_out(self) -> None:
        """Brings the clients' own models, and those that they keep, up to date."""
        for names, state in self.states.items():
            state.write_back()
            for stage, kept in state.kept.items():
                for k, name in enumerate(names):
                    self.clients[name].kept[stage] = {n: stack[k] for n, stack in kept.items()}
            state.kept = {}

    def snapshot(self) -> Message:
        """Returns all clients' snapshots."""
        self._hand_out()
        return super().snapshot()

    def restore(self, saved: Message) -> None:
        """Restores the clients that are in the snapshot."""
        for state in self.states.values():
            state.separate()
            state.kept = {}
        super().restore(saved)

    def keep_models(self, stage: str, shared: Message | None) -> None:
        """Makes every client keep what it predicts with.

        Models of a group are copied as one. The clients receive them in `models` and `snapshot`.
        """
        plainly = shared is None and not self.method.keeps_logits
        plainly = plainly and type(self.method).predictor is Method.predictor
        shared = None if shared is None else isolate(shared)
        for names, state in self.states.items():
            clients = [self.clients[name] for name in names]
            kept = copied_models(state, clients) if plainly else None
            if kept is not None:
                state.kept[stage] = kept
            else:
                state.write_back()
                state.kept.pop(stage, None)
                for client in clients:
                    client.keep(self.method, stage, shared)

    def models(self, stage: str | None = None, shared: Message | None = None) -> dict[str, Message]:
        """Returns what each client predicts with, now or in the best evaluation of a stage."""
        self._hand_out()
        return super().models(stage, shared)

    def artifacts(self) -> dict[str, Message]:
        """Returns copies of each client's artifacts."""
        self._hand_out()
        return super().artifacts()

    def close(self) -> None:
        """Separates the clients' models from the parameter stacks."""
        self._hand_out()
        for state in self.states.values():
            state.close()
        for client in self.clients.values():
            unstack(p for model in _models(client.state) for p in model.parameters())

    def details(self) -> Details:
        """Returns the clients of each group, and by phase how its calls ran.

        "recorded" counts clients for which a whole phase ran at once. "batched" and "single" count
        operations in lockstep. "lockstep" says why a phase was not recorded.
        """
        return {
            "clients_per_group": [len(names) for names in self.groups],
            "phases": {
                phase: {how: tally[how] for how in ("recorded", "batched", "single")}
                | ({"lockstep": self.unrecorded[phase]} if phase in self.unrecorded else {})
                for phase, tally in self.calls.items()
                if tally
            },
        }


def _models(state: dict[str, Any]) -> Iterator[nn.Module]:
    """Yields the models in a state and in its groups."""
    for value in state.values():
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, dict):
            yield from _models(value)


def delivered(messages: list[Message]) -> list[Message]:
    """Returns copies of messages that share no memory with the sender.

    A message to many clients is copied once. A client that writes to it gets its own copy then.
    """
    receivers: dict[int, list[int]] = {}
    for k, message in enumerate(messages):
        receivers.setdefault(id(message), []).append(k)
    arrived: list[Message] = [{} for _ in messages]
    for positions in receivers.values():
        own = isolate(messages[positions[0]])
        copies = lazy_copies_of_message(own, len(positions))
        for k, copy in zip(positions, copies, strict=True):
            arrived[k] = copy
    return arrived


def lazy_copies_of_message(message: Message, count: int) -> list[Message]:
    """Returns copies of a message. What one receiver writes, the others do not see."""
    made: list[Message] = [{} for _ in range(count)]
    for name, content in message.items():
        nested = isinstance(content, dict)
        copies = (lazy_copies_of_message if nested else lazy_copies)(content, count)
        for own, copy in zip(made, copies, strict=True):
            own[name] = copy
    return made


def groups(facts: Facts, nodes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Divides clients into groups of one architecture, in order.

    A group's activations are at most `GROUP_BYTES`, its parameters `GROUP_PARAMETER_BYTES`. A
    client with more than that is a group by itself.

    Args:
        facts: The facts of the run.
        nodes: The number of nodes of each client.
    """
    found: list[tuple[str, ...]] = []
    for spec in dict.fromkeys(facts.model_of[client] for client in nodes):
        group: list[str] = []
        filled = parameters = 0.0
        each = 4 * 4 * sum(math.prod(shape) for _, _, shape in model_schema(spec, facts))
        for client in (client for client in nodes if facts.model_of[client] == spec):
            filled, parameters = (
                filled + activations(facts, client, nodes[client]),
                parameters + each,
            )
            if group and (filled > GROUP_BYTES or parameters > GROUP_PARAMETER_BYTES):
                found.append(tuple(group))
                group = []
                filled, parameters = activations(facts, client, nodes[client]), each
            group.append(client)
        found.append(tuple(group))
    return found


def activations(facts: Facts, client: str, nodes: int) -> float:
    """Returns about how many bytes of activations a training step of a client has."""
    return 4 * 8 * nodes * facts.width_of(facts.model_of[client])
