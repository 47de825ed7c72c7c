"""The stacked engine: clients run in step, and what they do at the same moment is done once, on one block-diagonal graph.

Every client runs its own code, with its own noise (`fedloom.together` says how); models, losses and optimisers of one kind are stacked
beneath it. What a phase does besides is done for one client after another, as in the loop. States agree with the loop's but for rounding.

Clients run in crews, one crew after another: what a crew works on fits into the processor's cache, and a client that fills a crew by
itself runs as in the loop, with the loop's memory.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from fedloom.engines import loop
from fedloom.message import Message, flatten, isolate, unflatten
from fedloom.method import Method, model_schema
from fedloom.models import parse
from fedloom.party import Client, perform
from fedloom.stack import copies
from fedloom.together import Crew, in_step

CREW_BYTES = 32e6  # what a crew's clients work on at once: parameters, their optimisers' moments and gradients, and activations


class Engine(loop.Engine):
    """Runs clients in crews."""

    def __init__(self, method: Method, clients: Iterable[Client]):
        super().__init__(method, clients)
        self.crews = list(crews(self.clients.values(), CREW_BYTES))
        self.kept = {names: Crew() for names in self.crews}
        self.tally: dict[str, Counter[str]] = {}

    def call(self, phase: str, messages: dict[str, Message]) -> dict[str, Message]:
        """Takes a phase's name and a message per client, gives each client's reply."""
        replies: dict[str, Message] = {}
        for names in self.crews:
            asked = [name for name in names if name in messages]
            received = delivered([messages[name] for name in asked])
            tasks = [partial(perform, self.method, self.clients[name], phase, sent) for name, sent in zip(asked, received, strict=True)]
            done = in_step(tasks, self.kept[names]) if len(tasks) > 1 else [task() for task in tasks]
            replies.update(zip(asked, map(isolate, done), strict=True))
        return {name: replies[name] for name in messages}


def delivered(messages: list[Message]) -> list[Message]:
    """Copies that share no memory with the sender; a tensor that many are sent is copied once, and again only for who writes to it."""
    flat = [flatten(message) for message in messages]
    receivers: dict[int, list[tuple[int, str]]] = {}
    tensors: dict[int, Tensor] = {}
    for k, message in enumerate(flat):
        for name, tensor in message.items():
            receivers.setdefault(id(tensor), []).append((k, name))
            tensors[id(tensor)] = tensor
    arrived: list[dict[str, Tensor]] = [{} for _ in flat]
    for key, places in receivers.items():
        own = tensors[key].detach().clone(memory_format=torch.contiguous_format)
        for (k, name), copy in zip(places, copies(own, len(places)), strict=True):
            arrived[k][name] = copy
    return [unflatten(message) for message in arrived]


def crews(clients: Iterable[Client], limit: float) -> Iterator[tuple[str, ...]]:
    """Clients' names in groups that follow each other, each at most `limit` bytes of work at once, or one client."""
    crew: list[str] = []
    filled = 0.0
    for client in clients:
        size = working_set(client)
        if crew and filled + size > limit:
            yield tuple(crew)
            crew, filled = [], 0.0
        crew.append(client.name)
        filled += size
    if crew:
        yield tuple(crew)


def working_set(client: Client) -> float:
    """About how many bytes a training step of a client touches."""
    spec = client.facts.model_of[client.name]
    parameters = sum(math.prod(shape) for _, _, shape in model_schema(spec, client.facts))
    return 4 * (4 * parameters + 8 * client.full_graph.num_nodes * parse(spec).width)
