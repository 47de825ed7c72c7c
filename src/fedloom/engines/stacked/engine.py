"""The stacked engine: clients run in lockstep, and equal operations run once, on stacked data.

Every client runs its own code with its own random numbers (`fedloom.engines.stacked.lockstep`).
Models, losses and optimisers of one form run as one (`fedloom.engines.stacked.operations`). The
rest of a phase runs for one client after another, as in the loop engine. Results equal the loop
engine's up to rounding.

Clients run in groups, one group after another. The working set of a group fits into the processor's
cache. A client that fills a group by itself runs as in the loop engine, with its memory use.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from fedloom.core.absence import FaultPolicy
from fedloom.core.client import Client
from fedloom.core.facts import Facts, model_schema
from fedloom.core.message import Absent, Message, batched, isolate
from fedloom.core.method import Method
from fedloom.engines import loop
from fedloom.engines.base import Details
from fedloom.engines.stacked.lockstep import Group, run_lockstep
from fedloom.engines.stacked.operations import BATCHED
from fedloom.engines.stacked.parameters import unstack
from fedloom.engines.stacked.tensors import lazy_copies

GROUP_BYTES = 128e6  # working set of a group: parameters, moments, gradients, activations


class Engine(loop.Engine):
    """Runs groups of clients in lockstep."""

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
        self.groups = groups(next(iter(self.clients.values())).facts, nodes) if self.clients else []
        self.states = {names: Group(BATCHED) for names in self.groups}
        # By phase: how many calls ran "batched" and "single".
        self.calls: dict[str, Counter[str]] = {}

    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message | Absent]:
        """Runs the phase, group by group.

        Returns a `Batch` if all replies have the same schema.
        """
        replies: dict[str, Message] = {}
        for names in self.groups:
            asked = [name for name in names if name in messages]
            received = delivered([messages[name] for name in asked])
            tasks = [
                partial(self.clients[name].perform, self.method, phase, sent)
                for name, sent in zip(asked, received, strict=True)
            ]
            self.states[names].calls = self.calls.setdefault(phase, Counter())
            if len(names) > 1:
                done = run_lockstep(tasks, self.states[names])
            else:
                done = [task() for task in tasks]
            replies.update(zip(asked, done, strict=True))
        ordered = {name: replies[name] for name in messages}
        return batched(ordered) or {name: isolate(reply) for name, reply in ordered.items()}

    def close(self) -> None:
        """Separates the clients' models from the parameter stacks."""
        for client in self.clients.values():
            unstack(p for model in _models(client.state) for p in model.parameters())

    def details(self) -> Details:
        """Returns the clients of each group, and by phase how many calls were batched or single."""
        return {
            "clients_per_group": [len(names) for names in self.groups],
            "phases": {
                phase: {how: tally[how] for how in ("batched", "single")}
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
    """Divides clients, in order, into groups with working sets of at most `GROUP_BYTES`.

    A client with a larger working set is a group by itself.

    Args:
        facts: The facts of the run.
        nodes: The number of nodes of each client.
    """
    found: list[tuple[str, ...]] = []
    group: list[str] = []
    filled = 0.0
    for client, count in nodes.items():
        size = working_set(facts, client, count)
        if group and filled + size > GROUP_BYTES:
            found.append(tuple(group))
            group, filled = [], 0.0
        group.append(client)
        filled += size
    return [*found, tuple(group)] if group else found


def working_set(facts: Facts, client: str, nodes: int) -> float:
    """Returns about how many bytes a training step of a client touches."""
    spec = facts.model_of[client]
    parameters = sum(math.prod(shape) for _, _, shape in model_schema(spec, facts))
    return 4 * (4 * parameters + 8 * nodes * facts.width_of(spec))
