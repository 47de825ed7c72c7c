"""The stand-in for a client: its state, graphs and random streams are those of a whole group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedloom.core.client import LOSS, Client
from fedloom.core.facts import Facts
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.engines.stacked.parameters import stack_for
from fedloom.engines.stacked.stand_ins import (
    GroupGraph,
    GroupModel,
    GroupOptimizer,
    GroupStreams,
    Pending,
    RecordingError,
    StandIn,
)
from fedloom.engines.stacked.tensors import joint_tensor, split_rows
from fedloom.nn import metrics
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.weights import slots_of

if TYPE_CHECKING:
    from fedloom.engines.stacked.recording import Recording


class GroupState(StandIn):
    """The states of all clients. What a phase writes reaches the clients at its end."""

    def __init__(self, recording: Recording):
        vars(self).update(recording=recording, written={})

    recording: Recording
    written: dict[str, Any]

    def __contains__(self, name: str) -> bool:
        held = {name in client.state for client in self.recording.clients}
        if name not in self.written and len(held) > 1:
            raise RecordingError(f"only some clients have {name!r}")
        return name in self.written or held == {True}

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise RecordingError(f"no client has {name!r}")
        if name not in self.written:
            values = [client.state[name] for client in self.recording.clients]
            if isinstance(values[0], (nn.Module, Optimizer)):
                values = [member.state.get(name) for member in self.recording.members]
            self.written[name] = Read(joined(self.recording, values))
        value = self.written[name]
        return value.value if isinstance(value, Read) else value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value, or the default if no client has it."""
        found: Any = self[name] if name in self else default  # noqa: SIM401  (this is `get`)
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        self.written[name] = value

    def write(self) -> None:
        """Writes to the clients' states what the phase wrote."""
        clients = self.recording.clients
        for name, value in self.written.items():
            if not isinstance(value, Read):
                for client, own in zip(clients, separated(value, len(clients)), strict=True):
                    client.state[name] = own


class Read(NamedTuple):
    """A value that was read, not written."""

    value: Any


def joined(recording: Recording, values: Sequence[Any]) -> Any:
    """Returns a stand-in for one value of each client: tensors, dicts of tensors.

    Models and optimisers are those of all members of the group.
    """
    first = values[0]
    if isinstance(first, nn.Module):
        return _group_model(recording, values)
    if isinstance(first, Optimizer):
        return GroupOptimizer(values)
    if isinstance(first, dict):
        if any(not isinstance(v, dict) or v.keys() != first.keys() for v in values):
            raise RecordingError("the clients' values differ in names")
        return {name: joined(recording, [value[name] for value in values]) for name in first}
    if isinstance(first, Tensor) and len({(v.shape, v.dtype) for v in values}) == 1:

        def compute() -> Tensor:
            whole = joint_tensor(values)
            return torch.stack(list(values)) if whole is None else whole

        return Pending(recording, first.shape, compute)
    raise RecordingError(f"it uses a {type(first).__name__} of each client")


def _group_model(recording: Recording, models: Sequence[Any]) -> GroupModel:
    """Returns a stand-in for models of one form, all of whose parameters are trained."""
    first = models[0]
    if type(first) not in ARCHITECTURES.values():
        raise RecordingError("the model is not one of fedloom's own")
    if any(type(m) is not type(first) or m.form != first.form for m in models):
        raise RecordingError("the clients' models differ in form")
    stack = stack_for([slots_of(m) for m in models])
    if stack is None or not all(row.requires_grad for rows in stack.rows for row in rows):
        raise RecordingError("the clients' models are not trained as one")
    if recording.chosen is None:
        return GroupModel(models, stack)
    return GroupModel([models[k] for k in recording.chosen], recording.chosen_stack(stack))


def separated(value: Any, count: int) -> list[Any]:
    """Returns each client's own value; the inverse of `joined` for computed tensors."""
    if isinstance(value, dict):
        columns = {name: separated(inner, count) for name, inner in value.items()}
        return [{name: column[k] for name, column in columns.items()} for k in range(count)]
    if isinstance(value, Pending):
        return split_rows(value.dense)
    return [value.clone() for _ in range(count)]


class GroupClient(StandIn):
    """What a phase sees in place of a client."""

    def __init__(self, recording: Recording):
        clients = recording.clients
        vars(self).update(
            recording=recording,
            facts=clients[0].facts,
            state=GroupState(recording),
            graph=GroupGraph([client.graph for client in clients]),
            full_graph=GroupGraph([client.full_graph for client in clients]),
            _streams={},
            _batches={},
        )

    recording: Recording
    facts: Facts
    state: GroupState
    graph: GroupGraph
    full_graph: GroupGraph
    _streams: dict[str, GroupStreams]
    _batches: dict[int, list[GroupGraph]]

    loss, record_loss = Client.loss, Client.record_loss  # they use stand-ins as they use tensors

    @property
    def _losses(self) -> list[Any]:
        return self.recording.losses

    @cached_property
    def class_weight(self) -> Any:
        """The weights of classes at all clients, [clients, classes]; None if they have none."""
        found = [client.class_weight for client in self.recording.clients]
        given = [weight for weight in found if weight is not None]
        if given and len(given) < len(found):
            raise RecordingError("only some clients have class weights")
        return torch.stack(given) if given else None

    def rng(self, purpose: str) -> GroupStreams:
        """Returns the clients' random streams for a purpose."""
        if purpose not in self._streams:
            found = [client.rng(purpose) for client in self.recording.clients]
            self._streams[purpose] = GroupStreams(found)
        return self._streams[purpose]

    def batches(self, size: int) -> list[GroupGraph]:
        """Returns the batches of one epoch, if every client has one batch."""
        if size not in self._batches:
            batches = [client.batches(size) for client in self.recording.clients]
            if any(len(own) != 1 for own in batches):
                raise RecordingError("a client does not train on exactly one batch")
            self._batches[size] = [GroupGraph([own[0] for own in batches])]
        return self._batches[size]

    shuffled = batches

    def take_training_loss(self) -> Pending:
        """Returns the mean losses of the last training; see `Client.take_training_loss`."""
        clients = self.recording.clients

        def take() -> None:
            for client in clients:
                client.state.pop(LOSS, None)

        self.recording.last.append(take)

        def compute() -> Tensor:
            found = [client.state.get(LOSS) for client in clients]
            known = [loss for loss in found if loss is not None]
            whole = joint_tensor(known) if len(known) == len(found) else None
            if whole is None:
                absent = torch.tensor(metrics.UNDEFINED)
                whole = torch.stack([absent if loss is None else loss for loss in found])
            trains = self.recording.group.cached(
                "who trains",
                self.graph.graphs,
                lambda: torch.stack([graph.train.any() for graph in self.graph.graphs]),
            )
            return torch.where(whole.isfinite() & trains, whole, metrics.UNDEFINED)

        return Pending(self.recording, (), compute)

    def note_scored(self, method: Method, shared: Message | None, logits: Any) -> None:
        """Remembers what was scored; see `Client.note_scored`."""
        clients, graphs = self.recording.clients, self.full_graph.graphs
        whole = self.recording.whole_logits(logits, self.full_graph)

        def note() -> None:
            if method.keeps_logits:
                parts: Sequence[Tensor] = whole().split([graph.num_items for graph in graphs])
            else:
                parts = [torch.zeros(0)] * len(clients)  # nobody reads them
            for client, part in zip(clients, parts, strict=True):
                client.note_scored(method, shared, part)

        self.recording.last.append(note)
