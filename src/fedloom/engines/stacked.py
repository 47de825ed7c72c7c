"""The stacked engine: clients run in step, and what they do at the same moment is done once, on one block-diagonal graph.

Every client runs its own code, with its own noise (`fedloom.together` says how); models, losses and optimisers of one kind are stacked
beneath it. What a phase does besides is done for one client after another, as in the loop. States agree with the loop's but for rounding.

Clients run in crews, one crew after another: what a crew works on fits into the processor's cache, and a client that fills a crew by
itself runs as in the loop, with the loop's memory.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from fedloom.engines import loop
from fedloom.families import part
from fedloom.faults import Patience
from fedloom.message import Message, batched, isolate
from fedloom.method import Method, model_schema
from fedloom.models import parse
from fedloom.party import Client, Facts, perform
from fedloom.stack import copies
from fedloom.together import Crew, in_step

CREW_BYTES = 128e6  # what a crew's clients work on at once: parameters, their optimisers' moments and gradients, and activations


class Engine(loop.Engine):
    """Runs clients in crews."""

    outlives: ClassVar[bool] = False  # who fails in step takes its crew along

    def __init__(self, method: Method, clients: Iterable[Client], patience: Patience = Patience()):
        super().__init__(method, clients, patience)
        nodes = {client.name: client.full_graph.num_nodes for client in self.clients.values()}
        self.crews = crews(next(iter(self.clients.values())).facts, nodes) if self.clients else []
        self.kept = {names: Crew() for names in self.crews}
        self.tally: dict[str, Counter[str]] = {}  # by phase: how many calls of operations were done "together" and how many "alone"

    def call(self, phase: str, messages: dict[str, Message]) -> Mapping[str, Message]:  # type: ignore[override]
        """Takes a phase's name and a message per client, gives each client's reply; all in one, if they are alike."""
        replies: dict[str, Message] = {}
        for names in self.crews:
            asked = [name for name in names if name in messages]
            received = delivered([messages[name] for name in asked])
            tasks = [partial(perform, self.method, self.clients[name], phase, sent) for name, sent in zip(asked, received, strict=True)]
            self.kept[names].tally = self.tally.setdefault(phase, Counter())
            done = in_step(tasks, self.kept[names]) if len(names) > 1 else [task() for task in tasks]
            replies.update(zip(asked, done, strict=True))
        ordered = {name: replies[name] for name in messages}
        return batched(ordered) or {name: isolate(reply) for name, reply in ordered.items()}

    def close(self) -> None:
        """Lets models be each client's own again."""
        for client in self.clients.values():
            part(parameter for net in _models(client.state) for parameter in net.parameters())

    def about(self) -> dict[str, Any]:
        """For a run's summary: clients in each crew, and by phase how many calls were done for several at once, and how many not."""
        return {
            "clients_per_crew": [len(names) for names in self.crews],
            "phases": {phase: {how: tally[how] for how in ("together", "alone")} for phase, tally in self.tally.items() if tally},
        }


def _models(state: dict[str, Any]) -> Iterator[nn.Module]:
    """The models that a state holds, also in groups."""
    for value in state.values():
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, dict):
            yield from _models(value)


def delivered(messages: list[Message]) -> list[Message]:
    """Copies that share no memory with the sender; a message that many are sent is copied once, and again only for who writes to it."""
    receivers: dict[int, list[int]] = {}
    for k, message in enumerate(messages):
        receivers.setdefault(id(message), []).append(k)
    arrived: list[Message] = [{} for _ in messages]
    for who in receivers.values():
        own = isolate(messages[who[0]])
        for k, copy in zip(who, each_a_copy(own, len(who)), strict=True):
            arrived[k] = copy
    return arrived


def each_a_copy(message: Message, count: int) -> list[Message]:
    """So many copies of a message, of which nobody sees what another writes."""
    made: list[Message] = [{} for _ in range(count)]
    for name, content in message.items():
        for own, copy in zip(made, each_a_copy(content, count) if isinstance(content, dict) else copies(content, count), strict=True):
            own[name] = copy
    return made


def crews(facts: Facts, nodes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Clients' names in groups that follow each other, each at most `CREW_BYTES` of work at once, or one client."""
    found: list[tuple[str, ...]] = []
    crew: list[str] = []
    filled = 0.0
    for client, count in nodes.items():
        size = working_set(facts, client, count)
        if crew and filled + size > CREW_BYTES:
            found.append(tuple(crew))
            crew, filled = [], 0.0
        crew.append(client)
        filled += size
    return [*found, tuple(crew)] if crew else found


def working_set(facts: Facts, client: str, nodes: int) -> float:
    """About how many bytes a training step of a client touches."""
    spec = facts.model_of[client]
    parameters = sum(math.prod(shape) for _, _, shape in model_schema(spec, facts))
    return 4 * (4 * parameters + 8 * nodes * parse(spec).width)
