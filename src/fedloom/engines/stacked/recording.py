"""Recording: a phase runs once for a whole group of clients.

A phase is written for one client. `record` calls it once, with stand-ins for a client, its state
and its graphs. A stand-in computes nothing. It notes the operations (`fedloom.nn.operations`) that
the phase asks for: load weights, train, score, answer. The resulting `Recording` then runs on the
stacked tensors of all clients.

    phase(stand-in for a client) ─► [load, train, train, train, read weights] ─► run on stacks

A phase that does anything else with a stand-in raises `RecordingError`. Nothing has happened then,
and the clients run in lockstep. Stand-ins and real tensors mix freely: what all clients received in
one message is a real tensor, and what is computed from it is the same for all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedloom.core.client import LOSS, Client
from fedloom.core.message import Message, Stack
from fedloom.core.method import Method
from fedloom.core.phase import Phase
from fedloom.data.graph import Graph
from fedloom.engines.stacked import group_operations
from fedloom.engines.stacked.group import Group
from fedloom.engines.stacked.group_client import GroupClient, Read, joined
from fedloom.engines.stacked.group_operations import Penalty, Training
from fedloom.engines.stacked.parameters import (
    AnyOptimizer,
    AnyStack,
    ChosenOptimizer,
    ChosenStack,
    ParameterStack,
)
from fedloom.engines.stacked.stand_ins import (
    CrossEntropy,
    GroupGraph,
    GroupModel,
    GroupOptimizer,
    Logits,
    Objective,
    Pending,
    RecordingError,
    StandIn,
)
from fedloom.engines.stacked.tensors import split_rows
from fedloom.nn import losses, metrics, model, training, weights
from fedloom.nn.metric_names import PROBABILISTIC
from fedloom.nn.operations import Operation, set_scheduler


class Recording:
    """What a phase asks for, in order.

    Attributes:
        group: The group.
        members: All its clients.
        clients: Those that take part.
        chosen: Their numbers among the members; None if all take part.
        instructions: What to run, in order.
        last: What to do with the clients after that.
        losses: The losses that count as the clients' training loss.
        version: How many instructions have changed parameters so far.
    """

    def __init__(self, group: Group, members: Sequence[Client], chosen: Sequence[int] | None):
        self.group, self.members, self.chosen = group, members, chosen
        self.clients = members if chosen is None else [members[k] for k in chosen]
        self.copies: dict[object, ChosenStack | ChosenOptimizer] = {}
        self.instructions: list[Callable[[], None]] = []
        self.last: list[Callable[[], None]] = []
        self.losses: list[Objective] = []
        self.passes: list[Logits] = []
        self.version = 0
        self.client = GroupClient(self)
        self.reply: dict[str, Pending | Tensor] = {}

    def schedule(self, operation: Operation[Any, Any], *args: Any) -> Any:
        """Notes an operation. One without stand-ins runs at once: it is the same for all."""
        if not any(map(_has_stand_in, args)):
            return operation.function(*args)
        if operation not in RECORDED:
            raise RecordingError(f"it calls {operation.function.__name__}")
        return RECORDED[operation](self, *args)

    def require_current(self, logits: Logits) -> None:
        """Raises RecordingError if parameters have changed since the logits were computed."""
        if logits.version != self.version:
            raise RecordingError("it uses logits after the model has changed")

    def chosen_stack(self, stack: ParameterStack) -> ChosenStack:
        """Returns copies of the parameters of the clients that take part."""
        if stack not in self.copies:
            self.copies[stack] = ChosenStack(stack, torch.tensor(self.chosen))
        found = self.copies[stack]
        assert isinstance(found, ChosenStack)
        return found

    def optimizer_of(self, optimizers: Sequence[Optimizer], stack: AnyStack) -> AnyOptimizer | None:
        """Returns the optimisers of all members as one, or of those that take part."""
        whole = self.group.whole.optimizer_of(optimizers)
        if not isinstance(stack, ChosenStack) or whole is None:
            return whole
        if any(held is not stack.stack for held, _ in whole.positions) or not whole.ready():
            return None
        if whole not in self.copies:
            self.copies[whole] = ChosenOptimizer(whole, stack)
        found = self.copies[whole]
        assert isinstance(found, ChosenOptimizer)
        return found

    def whole_logits(self, logits: Any, graph: Any) -> Callable[[], Tensor]:
        """Returns a function that computes the logits of all clients, [items, classes], once."""
        if (
            not isinstance(logits, Logits)
            or graph is not logits.graph
            or logits.streams is not None
        ):
            raise RecordingError("it scores other logits than the model's own")
        self.require_current(logits)

        def compute() -> Tensor:
            if not logits.found:
                models, stack, graphs = logits.of.models, logits.of.stack, graph.graphs
                logits.found.append(
                    group_operations.logits(self.group, models, stack, graphs)
                    if logits.given is None
                    else group_operations.logits_with(self.group, models, graphs, logits.given)
                )
            return logits.found[0]

        return compute

    def finish(self, reply: Message) -> None:
        """Takes the phase's reply, and checks that the recording is complete."""
        self.reply = dict(sorted(_leaves(reply, "")))
        for value in self.reply.values():
            if isinstance(value, Pending):
                value.require_current()
        written = {n: v for n, v in self.client.state.written.items() if not isinstance(v, Read)}
        for name, value in _leaves(written, ""):
            if isinstance(value, Pending) and value.weights_of is not None:
                raise RecordingError(f"the state {name!r} shares memory with the model")
        if any(logits.streams is not None and not logits.stepped for logits in self.passes):
            raise RecordingError("it computes logits with dropout that no step uses")
        for loss in self.losses:
            if not _recorded_loss(loss).logits.stepped:
                raise RecordingError("it records a loss that no step uses")

    def release(self) -> None:
        """Ends the recording.

        It and its stand-ins refer to each other. Without this, they and the clients would stay in
        memory until the garbage collector runs.
        """
        vars(self.client.state).clear()
        vars(self.client).clear()
        vars(self).clear()

    def run(self) -> dict[str, Stack]:
        """Runs everything. Returns the replies of all clients, [clients, ...] for each name."""
        for instruction in self.instructions:
            instruction()
        for copy in self.copies.values():
            copy.write_back()
        self.client.state.write()
        for action in self.last:
            action()
        if self.losses:
            found = [_recorded_loss(loss).values for loss in self.losses]
            mean = torch.stack([f for f in found if f is not None]).double().mean(0).float()
            for client, value in zip(self.clients, split_rows(mean), strict=True):
                client.state[LOSS] = value
        return {name: _answered(value, len(self.clients)) for name, value in self.reply.items()}


def _recorded_loss(loss: Objective) -> CrossEntropy:
    (factor, term), *others = loss.terms
    if others or factor != 1 or not isinstance(term, CrossEntropy):
        raise RecordingError("it records a loss that is not a cross-entropy")
    return term


def _has_stand_in(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_stand_in, value.values()))
    return isinstance(value, StandIn)


def _leaves(message: Any, prefix: str) -> Iterator[tuple[str, Pending | Tensor]]:
    """Yields the tensors of a nested dict, real or pending, by name."""
    for name, value in message.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}/")
        elif isinstance(value, (Pending, Tensor)):
            yield prefix + name, value
        else:
            raise RecordingError(f"it returns or keeps a {type(value).__name__}")


def _answered(value: Pending | Tensor, clients: int) -> Stack:
    """Returns a value of the reply for all clients, in memory that nothing else uses."""
    if isinstance(value, Tensor):
        return value.detach().expand(clients, *value.shape).clone()
    if value.keep is not None:
        return value.keep()
    return value.dense.clone(memory_format=torch.contiguous_format)


# ---- operations ----


def _load(recording: Recording, of: Any, new: Mapping[str, Any]) -> None:
    if not isinstance(of, GroupModel):
        raise RecordingError("it loads weights into something that is not the client's model")
    own = of.parameters_by_name
    shapes = {name: of.stack.rows[j][0].shape for name, j in own.items()}
    if own.keys() != new.keys() or any(new[n].shape != shape for n, shape in shapes.items()):
        raise RecordingError("the weights do not fit the model")
    for value in new.values():
        if isinstance(value, Pending):
            value.require_current()
    recording.version += 1

    def run() -> None:
        given = {own[n]: v.dense if isinstance(v, Pending) else v for n, v in new.items()}
        group_operations.load(recording.group, of.stack, given)

    recording.instructions.append(run)


def _read(recording: Recording, of: Any) -> dict[str, Pending]:
    if not isinstance(of, GroupModel):
        raise RecordingError("it reads the weights of something that is not the client's model")

    def pending(j: int) -> Pending:
        return Pending(
            recording,
            of.stack.rows[j][0].shape,
            partial(group_operations.read, recording.group, of.stack, j),
            recording.version,
            partial(group_operations.kept, recording.group, of.stack, j),
        )

    return {name: pending(j) for name, j in of.parameters_by_name.items()}


def _forward(recording: Recording, of: Any, graph: Any, streams: Any) -> Logits:
    if not isinstance(of, GroupModel) or of.part or not isinstance(graph, GroupGraph):
        raise RecordingError("it runs another model or another graph than the client's own")
    if any(type(each) is not Graph or each.x.requires_grad for each in graph.graphs):
        raise RecordingError("its graphs are not plain ones")
    recording.passes.append(Logits(of, graph, streams, recording.version))
    return recording.passes[-1]


def _loss(
    recording: Recording, logits: Any, graph: Any, reduction: str, of_class: Any
) -> Objective:
    if not isinstance(logits, Logits) or graph is not logits.graph or reduction != "mean":
        raise RecordingError("its loss is not the mean loss of the model's own logits")
    if isinstance(of_class, StandIn) or not torch.is_grad_enabled():
        raise RecordingError("its loss has no gradient, or class weights of its own")
    return Objective((1.0, CrossEntropy(logits, of_class)))


def _squared_distance(recording: Recording, of: Any, anchor: Mapping[str, Any]) -> Objective:
    return Objective((1.0, _penalty(of, True, anchor)))


def _inner_product(recording: Recording, of: Any, direction: Mapping[str, Any]) -> Objective:
    return Objective((1.0, _penalty(of, False, direction)))


def _penalty(of: Any, squared: bool, values: Mapping[str, Any]) -> Penalty:
    if not isinstance(of, GroupModel) or of.part:
        raise RecordingError("its penalty is not on the whole model")
    by_number = {j: values[name] for name, j in of.parameters_by_name.items()}
    if any(isinstance(v, Pending) and v.weights_of is not None for v in by_number.values()):
        raise RecordingError("its penalty shares memory with the model")
    return Penalty(squared, by_number)


def _step(recording: Recording, optimizer: Any, loss: Any) -> None:
    if not isinstance(optimizer, GroupOptimizer) or not isinstance(loss, Objective):
        raise RecordingError("its step is not one of the client's own optimiser")
    entropies = [(f, term) for f, term in loss.terms if isinstance(term, CrossEntropy)]
    penalties = [(f, term) for f, term in loss.terms if isinstance(term, Penalty)]
    if len(entropies) != 1 or entropies[0][0] != 1:
        raise RecordingError("its loss is not a cross-entropy with penalties")
    entropy = entropies[0][1]
    logits = entropy.logits
    recording.require_current(logits)
    if logits.stepped:
        raise RecordingError("it uses the same logits twice")
    vars(logits).update(stepped=True)
    recording.version += 1
    job = Steps(recording, optimizer, entropy, penalties)
    last = recording.instructions[-1] if recording.instructions else None
    if isinstance(last, Steps) and last.repeats(job):
        last.entropies.append(entropy)
    else:
        job.prepare()
        recording.instructions.append(job)


class Steps:
    """An instruction: equal training steps, one after another."""

    def __init__(
        self,
        recording: Recording,
        optimizer: GroupOptimizer,
        entropy: CrossEntropy,
        penalties: Sequence[tuple[float, Penalty]],
    ):
        self.recording, self.optimizer, self.penalties = recording, optimizer, penalties
        self.entropies = [entropy]
        self.training: Training | None = None

    def repeats(self, other: Steps) -> bool:
        """Returns whether another step does the same again."""
        mine, its = self.entropies[0], other.entropies[0]
        return (
            self.optimizer is other.optimizer
            and mine.of_class is its.of_class
            and mine.logits.of is its.logits.of
            and mine.logits.graph is its.logits.graph
            and mine.logits.streams is its.logits.streams
            and _same_penalties(self.penalties, other.penalties)
        )

    def prepare(self) -> None:
        """Raises RecordingError if the step has no form for the group."""
        logits, optimizers = self.entropies[0].logits, self.optimizer.optimizers
        self.training = Training.of(
            self.recording.group,
            logits.of.models,
            logits.of.stack,
            self.recording.optimizer_of(optimizers, logits.of.stack),
            logits.graph.graphs,
            None if logits.streams is None else logits.streams.generators,
            self.entropies[0].of_class,
            self.penalties,
        )
        if self.training is None:
            raise RecordingError("its model or its optimiser has no form for a whole group")

    def __call__(self) -> None:
        assert self.training is not None  # `prepare` came first
        losses = self.training.steps(len(self.entropies))
        for entropy, values in zip(self.entropies, losses, strict=True):
            entropy.values = values


def _same_penalties(
    some: Sequence[tuple[float, Penalty]], others: Sequence[tuple[float, Penalty]]
) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(
        factor == other and penalty.equals(same) for (factor, penalty), (other, same) in pairs
    )


def _held_out(recording: Recording, logits: Any, graph: Any) -> Pending:
    whole = recording.whole_logits(logits, graph)
    shape = (2, graph.num_classes, graph.num_classes)
    return Pending(
        recording,
        shape,
        lambda: group_operations.confusion_matrices(recording.group, whole(), graph.graphs),
    )


def _from_probabilities(
    recording: Recording, logits: Any, graph: Any, k: int, selection: str
) -> Pending:
    whole = recording.whole_logits(logits, graph)

    def compute() -> Tensor:
        parts = whole().split([g.num_items for g in graph.graphs])
        scored = metrics.from_probabilities.function
        pairs = zip(parts, graph.graphs, strict=True)
        return torch.stack([scored(part, g, k, selection) for part, g in pairs])

    return Pending(recording, (2, 1 + len(PROBABILISTIC)), compute)


def _forward_with(recording: Recording, of: Any, graph: Any, given: Mapping[str, Any]) -> Logits:
    logits = _forward(recording, of, graph, None)
    if any(isinstance(value, StandIn) for value in given.values()):
        raise RecordingError("each client scores other weights")
    if of.parameters_by_name.keys() != given.keys():
        raise RecordingError("the weights do not fit the model")
    vars(logits).update(given=given)
    return logits


RECORDED: Mapping[Operation[Any, Any], Callable[..., Any]] = {
    weights.load_weights: _load,
    weights.weights: _read,
    weights.squared_distance: _squared_distance,
    weights.inner_product: _inner_product,
    model.forward: _forward,
    model.forward_with: _forward_with,
    losses.training_loss: _loss,
    training.step: _step,
    metrics.held_out: _held_out,
    metrics.from_probabilities: _from_probabilities,
}


def record(
    group: Group,
    members: Sequence[Client],
    chosen: Sequence[int] | None,
    method: Method,
    phase: Phase,
    messages: Sequence[Message],
) -> Recording | str:
    """Records a phase for a group of clients.

    Args:
        group: The group.
        members: All its clients.
        chosen: The numbers of those that take part. None: all.
        method: The method.
        phase: The phase.
        messages: The message of each client that takes part.

    Returns the recording, or why there is none. Then nothing has happened.
    """
    recording = Recording(group, members, chosen)
    before = set_scheduler(recording.schedule)
    try:
        first = messages[0]
        same = all(message is first for message in messages)
        received = first if same else joined(recording, messages)
        recording.finish(phase.function(method, recording.client, **received))
    except RecordingError as error:
        recording.release()
        return str(error)
    # Python and torch refuse some uses of a stand-in by errors of their own. If the error is a
    # real one, the phase raises it again in lockstep.
    except Exception as error:  # noqa: BLE001
        recording.release()
        return f"{type(error).__name__}: {error}"
    finally:
        set_scheduler(before)
    return recording
