"""Recording: a phase runs once for a whole group of clients.

A phase is written for one client. `record` calls it once, with stand-ins for a client, its state
and its graphs. A stand-in computes nothing. It notes the operations (`fedloom.nn.operations`) that
the phase asks for: load weights, train, score, answer. The resulting `Recording` then runs on the
stacked tensors of all clients.

    phase(stand-in for a client) ─► [load, train, train, train, read weights] ─► run on stacks

A phase that does anything else with a stand-in raises `CannotRecord`. Nothing has happened then,
and the clients run in lockstep. Stand-ins and real tensors mix freely: what all clients received in
one message is a real tensor, and what is computed from it is the same for all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedloom.core.client import LOSS, Client
from fedloom.core.message import Message, Stack
from fedloom.core.method import Method
from fedloom.core.phase import Phase
from fedloom.core.shared_rows import SharedRows
from fedloom.data.graph import Graph
from fedloom.engines.stacked import group_operations
from fedloom.engines.stacked.group import Group
from fedloom.engines.stacked.group_operations import Penalty, Training
from fedloom.engines.stacked.parameters import ParameterStack, StackedOptimizer, stack_for
from fedloom.engines.stacked.tensors import joint_tensor, split_rows
from fedloom.nn import losses, metrics, model, training, weights
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.operations import Operation, set_scheduler


class CannotRecord(Exception):
    """A phase does something that has no form for a whole group."""


class StandIn:
    """Base of what a phase sees in place of a client and its belongings."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotRecord(f"it uses {type(self).__name__}.{name}")


# ---- numbers ----


class Pending(StandIn):
    """A tensor of each client that the recording computes.

    Args:
        recording: The recording that computes it.
        shape: The shape of one client's tensor.
        compute: Returns the tensors of all clients, [clients, *shape].
    """

    def __init__(
        self, recording: Recording, shape: Sequence[int], compute: Callable[[], Stack]
    ) -> None:
        self.recording, self.shape, self.stack = recording, torch.Size(shape), None

        def run() -> None:
            self.stack = compute()

        self.stack: Stack | None
        recording.instructions.append(run)

    @property
    def dense(self) -> Tensor:
        """The computed tensors, [clients, *shape]."""
        assert self.stack is not None  # its instruction has run
        return self.stack.dense() if isinstance(self.stack, SharedRows) else self.stack

    def detach(self) -> Pending:
        """Returns itself: no gradient flows through it."""
        return self

    def __getitem__(self, key: Any) -> Pending:
        key = key if isinstance(key, tuple) else (key,)
        shape = torch.empty(self.shape, device="meta")[key].shape
        return Pending(self.recording, shape, lambda: self.dense[(slice(None), *key)])

    def __iter__(self) -> Iterator[Pending]:
        return (self[k] for k in range(self.shape[0]))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Pending:
        if function not in ELEMENTWISE or kwargs:
            raise CannotRecord(f"it calls {getattr(function, '__name__', function)}")
        return elementwise(function, *args)

    def __add__(self, other: Any) -> Pending:
        return elementwise(torch.add, self, other)

    def __sub__(self, other: Any) -> Pending:
        return elementwise(torch.sub, self, other)

    def __rsub__(self, other: Any) -> Pending:
        return elementwise(torch.sub, other, self)

    def __mul__(self, other: Any) -> Pending:
        return elementwise(torch.mul, self, other)

    def __truediv__(self, other: Any) -> Pending:
        return elementwise(torch.div, self, other)

    __radd__, __rmul__ = __add__, __mul__


# Functions whose result for many clients is that of their stacked tensors.
ELEMENTWISE = {
    torch.add, torch.sub, torch.mul, torch.div, torch.zeros_like, torch.clone,
    Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.clone,
    Tensor.__sub__, Tensor.__rsub__, Tensor.__add__, Tensor.__mul__, Tensor.__truediv__,
}  # fmt: skip


def elementwise(function: Callable[..., Tensor], *args: Any) -> Pending:
    """Applies an elementwise function to tensors of one shape, pending or real, and numbers."""
    pending = [a for a in args if isinstance(a, Pending)]
    shapes = {tuple(a.shape) for a in args if isinstance(a, (Pending, Tensor))}
    if len(shapes) != 1 or any(
        not isinstance(a, (Pending, Tensor, int, float)) for a in args
    ):
        raise CannotRecord("it combines tensors of different shapes")
    return Pending(
        pending[0].recording,
        pending[0].shape,
        lambda: function(*(a.dense if isinstance(a, Pending) else a for a in args)),
    )


# ---- losses ----


class Logits(StandIn):
    """The logits of all clients. A pass with dropout belongs to one step.

    version: the version of the recording in which the phase computed them.
    """

    def __init__(
        self, of: GroupModel, graph: GroupGraph, streams: GroupStreams | None, version: int
    ):
        self.of, self.graph, self.streams, self.version = of, graph, streams, version
        self.given: Mapping[str, Tensor] | None = None  # weights in place of the models' own
        self.found: list[Tensor] = []  # the logits, when they have been computed
        self.stepped = False


class CrossEntropy:
    """The mean loss over training items; see `fedloom.nn.losses.training_loss`.

    of_class: the class weights [clients, classes], or None.
    """

    def __init__(self, logits: Logits, of_class: Tensor | None):
        self.logits, self.of_class = logits, of_class
        self.values: Tensor | None = None  # of each client, after the step


class Objective(StandIn):
    """A loss: terms with factors."""

    requires_grad = True

    def __init__(self, *terms: tuple[float, CrossEntropy | Penalty]):
        self.terms = terms

    def detach(self) -> Objective:
        """Returns itself: `Client.record_loss` asks for it."""
        return self

    def __add__(self, other: Any) -> Objective:
        if not isinstance(other, Objective):
            raise CannotRecord("it adds something else to a loss")
        return Objective(*self.terms, *other.terms)

    def __mul__(self, factor: Any) -> Objective:
        if not isinstance(factor, (int, float)):
            raise CannotRecord("it multiplies a loss by something that is not a number")
        return Objective(*((factor * each, term) for each, term in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Objective:
        return self * (1 / divisor)


# ---- a client and its belongings ----


class GroupModel(StandIn):
    """The models of all clients, or one part of each.

    Args:
        models: The models.
        stack: Their parameters.
        part: The name of the part with a dot, such as "classifier."; "" for the whole models.
    """

    def __init__(self, models: Sequence[Any], stack: ParameterStack, part: str = ""):
        self.models, self.stack, self.part = models, stack, part

    def __call__(self, graph: Any, rng: Any = None) -> Any:
        """Returns the logits of the graphs' items."""
        return model.forward(self, graph, rng)  # type: ignore[arg-type]

    @property
    def classifier(self) -> GroupModel:
        """The heads of the models."""
        return GroupModel(self.models, self.stack, "classifier.")

    @property
    def parameters_by_name(self) -> dict[str, int]:
        """The number of each parameter of the part in the stack, by its name in the part."""
        names = [name for _, _, name in self.stack.slots[0]]
        found = {n[len(self.part) :]: j for j, n in enumerate(names) if n.startswith(self.part)}
        return dict(sorted(found.items()))


class GroupOptimizer(StandIn):
    """The optimisers of all clients."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers = optimizers


class GroupGraph(StandIn):
    """A graph of each client."""

    def __init__(self, graphs: Sequence[Graph]):
        self.graphs = graphs

    @property
    def num_classes(self) -> int:
        """The number of classes, the same for all."""
        return self.graphs[0].num_classes


class GroupStreams(StandIn):
    """A random stream of each client."""

    def __init__(self, generators: Sequence[torch.Generator]):
        self.generators = generators


class GroupState(StandIn):
    """The states of all clients. What a phase writes reaches the clients at its end."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.written: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        held = {name in client.state for client in self.recording.clients}
        if name not in self.written and len(held) > 1:
            raise CannotRecord(f"only some clients have {name!r}")
        return name in self.written or held == {True}

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise CannotRecord(f"no client has {name!r}")
        if name not in self.written:
            values = [client.state[name] for client in self.recording.clients]
            self.written[name] = _Held(joined(self.recording, values))
        value = self.written[name]
        return value.value if isinstance(value, _Held) else value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value, or the default if no client has it."""
        return self[name] if name in self else default

    def __setitem__(self, name: str, value: Any) -> None:
        self.written[name] = value

    def write(self) -> None:
        """Writes to the clients' states what the phase wrote."""
        clients = self.recording.clients
        for name, value in self.written.items():
            if not isinstance(value, _Held):
                for client, own in zip(clients, separated(value, len(clients)), strict=True):
                    client.state[name] = own


class _Held(NamedTuple):
    """A value that was read, not written."""

    value: Any


def joined(recording: Recording, values: Sequence[Any]) -> Any:
    """Returns a stand-in for one value of each client: models, tensors, dicts of tensors."""
    first = values[0]
    if isinstance(first, nn.Module):
        return _group_model(values)
    if isinstance(first, Optimizer):
        return GroupOptimizer(values)
    if isinstance(first, dict):
        if any(not isinstance(v, dict) or v.keys() != first.keys() for v in values):
            raise CannotRecord("the clients' values differ in names")
        return {name: joined(recording, [value[name] for value in values]) for name in first}
    if isinstance(first, Tensor) and len({(v.shape, v.dtype) for v in values}) == 1:

        def compute() -> Tensor:
            whole = joint_tensor(values)
            return torch.stack(list(values)) if whole is None else whole

        return Pending(recording, first.shape, compute)
    raise CannotRecord(f"it uses a {type(first).__name__} of each client")


def _group_model(models: Sequence[Any]) -> GroupModel:
    """Returns a stand-in for models of one form, all of whose parameters are trained."""
    first = models[0]
    if type(first) not in ARCHITECTURES.values():
        raise CannotRecord("the model is not one of fedloom's own")
    if any(type(m) is not type(first) or m.form != first.form for m in models):
        raise CannotRecord("the clients' models differ in form")
    stack = stack_for([weights.slots_of(m) for m in models])
    if stack is None or not all(row.requires_grad for rows in stack.rows for row in rows):
        raise CannotRecord("the clients' models are not trained as one")
    return GroupModel(models, stack)


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
        self.recording, self.facts = recording, clients[0].facts
        self.state = GroupState(recording)
        self.graph = GroupGraph([client.graph for client in clients])
        self.full_graph = GroupGraph([client.full_graph for client in clients])
        self._streams: dict[str, GroupStreams] = {}
        self._batches: dict[int, list[GroupGraph]] = {}

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
            raise CannotRecord("only some clients have class weights")
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
                raise CannotRecord("a client does not train on exactly one batch")
            self._batches[size] = [GroupGraph([own[0] for own in batches])]
        return self._batches[size]

    shuffled = batches

    def take_training_loss(self) -> Pending:
        """Returns the mean losses of the last training; see `Client.take_training_loss`."""
        clients = self.recording.clients
        self.recording.last.append(lambda: [client.state.pop(LOSS, None) for client in clients])

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
        if method.keeps_logits:
            raise CannotRecord("clients keep their logits")
        clients = self.recording.clients
        self.recording.last.append(
            lambda: [client.note_scored(method, shared, NO_LOGITS) for client in clients]
        )


NO_LOGITS = torch.zeros(0)  # `Client.note_scored` does not keep them


# ---- the recording ----


class Recording:
    """What a phase asks for, in order.

    Attributes:
        group: The group.
        clients: Its clients.
        instructions: What to run, in order.
        last: What to do with the clients after that.
        losses: The losses that count as the clients' training loss.
        version: How many instructions have changed parameters so far.
    """

    def __init__(self, group: Group, clients: Sequence[Client]):
        self.group, self.clients = group, clients
        self.instructions: list[Callable[[], None]] = []
        self.last: list[Callable[[], object]] = []
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
            raise CannotRecord(f"it calls {operation.function.__name__}")
        return RECORDED[operation](self, *args)

    def require_current(self, logits: Logits) -> None:
        """Raises CannotRecord if parameters have changed since the logits were computed."""
        if logits.version != self.version:
            raise CannotRecord("it uses logits after the model has changed")

    def finish(self, reply: Message) -> None:
        """Takes the phase's reply, and checks that the recording is complete."""
        self.reply = dict(sorted(_leaves(reply, "")))
        for value in self.client.state.written.values():
            if not isinstance(value, _Held):
                list(_leaves({"state": value}, ""))
        if any(logits.streams is not None and not logits.stepped for logits in self.passes):
            raise CannotRecord("it computes logits with dropout that no step uses")
        for loss in self.losses:
            if not _recorded_loss(loss).logits.stepped:
                raise CannotRecord("it records a loss that no step uses")

    def run(self) -> dict[str, Stack]:
        """Runs everything. Returns the replies of all clients, [clients, ...] for each name."""
        for instruction in self.instructions:
            instruction()
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
        raise CannotRecord("it records a loss that is not a cross-entropy")
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
            raise CannotRecord(f"it returns or keeps a {type(value).__name__}")


def _answered(value: Pending | Tensor, clients: int) -> Stack:
    """Returns a value of the reply for all clients, in memory that nothing else uses."""
    if isinstance(value, Tensor):
        return value.detach().expand(clients, *value.shape).clone()
    assert value.stack is not None  # its instruction has run
    return group_operations.copy_of(value.stack)


# ---- operations ----


def _load(recording: Recording, of: Any, new: Mapping[str, Any]) -> None:
    if not isinstance(of, GroupModel):
        raise CannotRecord("it loads weights into something that is not the client's model")
    own = of.parameters_by_name
    shapes = {name: of.stack.rows[j][0].shape for name, j in own.items()}
    if own.keys() != new.keys() or any(new[n].shape != shape for n, shape in shapes.items()):
        raise CannotRecord("the weights do not fit the model")
    recording.version += 1

    def run() -> None:
        given = {own[n]: v.dense if isinstance(v, Pending) else v for n, v in new.items()}
        group_operations.load(recording.group, of.stack, given)

    recording.instructions.append(run)


def _read(recording: Recording, of: Any) -> dict[str, Pending]:
    if not isinstance(of, GroupModel):
        raise CannotRecord("it reads the weights of something that is not the client's model")

    def reads(j: int) -> Callable[[], Stack]:
        return lambda: group_operations.read(recording.group, of.stack, j)

    own = of.parameters_by_name
    return {n: Pending(recording, of.stack.rows[j][0].shape, reads(j)) for n, j in own.items()}


def _forward(recording: Recording, of: Any, graph: Any, streams: Any) -> Logits:
    if not isinstance(of, GroupModel) or of.part or not isinstance(graph, GroupGraph):
        raise CannotRecord("it runs another model or another graph than the client's own")
    recording.passes.append(Logits(of, graph, streams, recording.version))
    return recording.passes[-1]


def _loss(
    recording: Recording, logits: Any, graph: Any, reduction: str, of_class: Any
) -> Objective:
    if not isinstance(logits, Logits) or graph is not logits.graph or reduction != "mean":
        raise CannotRecord("its loss is not the mean loss of the model's own logits")
    if isinstance(of_class, StandIn):
        raise CannotRecord("its class weights depend on the client")
    return Objective((1.0, CrossEntropy(logits, of_class)))


def _squared_distance(recording: Recording, of: Any, anchor: Mapping[str, Any]) -> Objective:
    return Objective((1.0, _penalty(of, True, anchor)))


def _inner_product(recording: Recording, of: Any, direction: Mapping[str, Any]) -> Objective:
    return Objective((1.0, _penalty(of, False, direction)))


def _penalty(of: Any, squared: bool, values: Mapping[str, Any]) -> Penalty:
    if not isinstance(of, GroupModel) or of.part:
        raise CannotRecord("its penalty is not on the whole model")
    by_number = {j: values[name] for name, j in of.parameters_by_name.items()}
    return Penalty(squared, by_number)


def _step(recording: Recording, optimizer: Any, loss: Any) -> None:
    if not isinstance(optimizer, GroupOptimizer) or not isinstance(loss, Objective):
        raise CannotRecord("its step is not one of the client's own optimiser")
    entropies = [(f, term) for f, term in loss.terms if isinstance(term, CrossEntropy)]
    penalties = [(f, term) for f, term in loss.terms if isinstance(term, Penalty)]
    if len(entropies) != 1 or entropies[0][0] != 1:
        raise CannotRecord("its loss is not a cross-entropy with penalties")
    entropy = entropies[0][1]
    logits = entropy.logits
    recording.require_current(logits)
    if logits.stepped:
        raise CannotRecord("it uses the same logits twice")
    logits.stepped = True
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
            and len(self.penalties) == len(other.penalties)
            and all(a[0] == b[0] and a[1].equals(b[1]) for a, b in zip(
                self.penalties, other.penalties, strict=True
            ))
        )  # fmt: skip

    def prepare(self) -> None:
        """Raises CannotRecord if the step has no form for the group."""
        logits, optimizers = self.entropies[0].logits, self.optimizer.optimizers
        group = self.recording.group
        stacked = group.cached("optimizer", optimizers, lambda: StackedOptimizer.of(optimizers))
        self.training = Training.of(
            group,
            logits.of.models,
            logits.of.stack,
            stacked,
            logits.graph.graphs,
            None if logits.streams is None else logits.streams.generators,
            self.entropies[0].of_class,
            self.penalties,
        )
        if self.training is None:
            raise CannotRecord("its model or its optimiser has no form for a whole group")

    def __call__(self) -> None:
        assert self.training is not None  # `prepare` came first
        losses = self.training.steps(len(self.entropies))
        for entropy, values in zip(self.entropies, losses, strict=True):
            entropy.values = values


def _held_out(recording: Recording, logits: Any, graph: Any) -> Pending:
    whole = _whole_logits(recording, logits, graph)
    shape = (2, graph.num_classes, graph.num_classes)
    return Pending(
        recording,
        shape,
        lambda: group_operations.confusion_matrices(recording.group, whole(), graph.graphs),
    )


def _from_probabilities(
    recording: Recording, logits: Any, graph: Any, k: int, selection: str
) -> Pending:
    whole = _whole_logits(recording, logits, graph)

    def compute() -> Tensor:
        parts = whole().split([g.num_items for g in graph.graphs])
        scored = metrics.from_probabilities.function
        pairs = zip(parts, graph.graphs, strict=True)
        return torch.stack([scored(part, g, k, selection) for part, g in pairs])

    return Pending(recording, (2, 1 + len(metrics.PROBABILISTIC)), compute)


def _whole_logits(recording: Recording, logits: Any, graph: Any) -> Callable[[], Tensor]:
    """Returns a function that computes the logits of all clients, once."""
    if not isinstance(logits, Logits) or graph is not logits.graph or logits.streams is not None:
        raise CannotRecord("it scores other logits than the model's own")
    recording.require_current(logits)

    def compute() -> Tensor:
        if not logits.found:
            of, graphs = logits.of, graph.graphs
            logits.found.append(
                group_operations.logits(recording.group, of.models, of.stack, graphs)
                if logits.given is None
                else group_operations.logits_with(recording.group, of.models, graphs, logits.given)
            )
        return logits.found[0]

    return compute


def _forward_with(recording: Recording, of: Any, graph: Any, given: Mapping[str, Any]) -> Logits:
    logits = _forward(recording, of, graph, None)
    if any(isinstance(value, StandIn) for value in given.values()):
        raise CannotRecord("each client scores other weights")
    if of.parameters_by_name.keys() != given.keys():
        raise CannotRecord("the weights do not fit the model")
    logits.given = given
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
    group: Group, clients: Sequence[Client], method: Method, phase: Phase, messages: Sequence[Message]
) -> Recording | str:
    """Records a phase for a group of clients.

    Args:
        group: The group.
        clients: Its clients.
        method: The method.
        phase: The phase.
        messages: The message of each client.

    Returns the recording, or why there is none. Then nothing has happened.
    """
    recording = Recording(group, clients)
    before = set_scheduler(recording.schedule)
    try:
        first = messages[0]
        same = all(message is first for message in messages)
        received = first if same else joined(recording, messages)
        recording.finish(phase.function(method, recording.client, **received))
    except CannotRecord as error:
        return str(error)
    # Python and torch refuse some uses of a stand-in by errors of their own. If the error is a
    # real one, the phase raises it again in lockstep.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    finally:
        set_scheduler(before)
    return recording
