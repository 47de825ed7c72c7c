"""Stand-ins: what a phase sees in place of tensors, models, graphs and losses while it is recorded.

Each stands for one thing of every client of a group. A stand-in computes nothing. It raises
`RecordingError` when a phase uses it in a way that has no form for a whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedloom.core.message import Stack
from fedloom.core.shared_rows import SharedRows
from fedloom.data.graph import Graph
from fedloom.engines.stacked.group_operations import Penalty
from fedloom.engines.stacked.parameters import AnyStack
from fedloom.nn import model

if TYPE_CHECKING:
    from fedloom.engines.stacked.recording import Recording


class RecordingError(Exception):
    """A phase does something that has no form for a whole group."""


class StandIn:
    """Base of what a phase sees in place of a client and its belongings.

    A phase can neither read nor write attributes that a stand-in does not offer. The recording
    itself sets attributes through `vars`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        raise RecordingError(f"it sets {type(self).__name__}.{name}")

    def _refuse(self, *_: Any) -> NoReturn:
        raise RecordingError(f"it compares, copies or decides by a {type(self).__name__}")

    # Python has defaults for these. A phase that uses them asks for each client's own answer.
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RecordingError(f"it uses {type(self).__name__}.{name}")


# ---- numbers ----


class Pending(StandIn):
    """A tensor of each client that the recording computes.

    Args:
        recording: The recording that computes it.
        shape: The shape of one client's tensor.
        compute: Returns the tensors of all clients, [clients, *shape].
        weights_of: The version of the recording whose weights it shares memory with. None: it has
            its own memory.
        keep: Returns such weights in memory that does not change with the models.
    """

    recording: Recording
    shape: torch.Size
    stack: Stack | None  # what `compute` returned

    weights_of: int | None
    keep: Callable[[], Stack] | None

    def __init__(
        self,
        recording: Recording,
        shape: Sequence[int],
        compute: Callable[[], Stack],
        weights_of: int | None = None,
        keep: Callable[[], Stack] | None = None,
    ) -> None:
        vars(self).update(recording=recording, shape=torch.Size(shape), stack=None)
        vars(self).update(weights_of=weights_of, keep=keep)
        recording.instructions.append(lambda: vars(self).update(stack=compute()))

    @property
    def dense(self) -> Tensor:
        """The computed tensors, [clients, *shape]."""
        assert self.stack is not None  # its instruction has run
        return self.stack.dense() if isinstance(self.stack, SharedRows) else self.stack

    def detach(self) -> Pending:
        """Returns itself: no gradient flows through it."""
        return self

    def clone(self) -> Pending:
        """Returns a copy."""
        return elementwise(torch.clone, self)

    def require_current(self) -> None:
        """Raises a RecordingError if it shares memory with weights that have changed since."""
        if self.weights_of not in (None, self.recording.version):
            raise RecordingError("it uses weights after the model has changed, without a copy")

    def __getitem__(self, key: Any) -> Pending:
        self.require_current()
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
            raise RecordingError(f"it calls {getattr(function, '__name__', function)}")
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
    for each in pending:
        each.require_current()
    shapes = {tuple(a.shape) for a in args if isinstance(a, (Pending, Tensor))}
    if len(shapes) != 1 or any(not isinstance(a, (Pending, Tensor, int, float)) for a in args):
        raise RecordingError("it combines tensors of different shapes")
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
        vars(self).update(of=of, graph=graph, streams=streams, version=version)
        vars(self).update(given=None, found=[], stepped=False)

    of: GroupModel
    graph: GroupGraph
    streams: GroupStreams | None
    version: int
    given: Mapping[str, Tensor] | None  # weights in place of the models' own
    found: list[Tensor]  # the logits, when they have been computed
    stepped: bool  # whether a step uses them


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
        vars(self).update(terms=terms)

    terms: tuple[tuple[float, CrossEntropy | Penalty], ...]

    def detach(self) -> Objective:
        """Returns itself: `Client.record_loss` asks for it."""
        return self

    def __add__(self, other: Any) -> Objective:
        if not isinstance(other, Objective):
            raise RecordingError("it adds something else to a loss")
        return Objective(*self.terms, *other.terms)

    def __mul__(self, factor: Any) -> Objective:
        if not isinstance(factor, (int, float)):
            raise RecordingError("it multiplies a loss by something that is not a number")
        return Objective(*((factor * each, term) for each, term in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Objective:
        return self * (1 / divisor)


# ---- what belongs to a client ----


class GroupModel(StandIn):
    """The models of all clients, or one part of each.

    Args:
        models: The models.
        stack: Their parameters.
        part: The name of the part with a dot, such as "classifier."; "" for the whole models.
    """

    def __init__(self, models: Sequence[Any], stack: AnyStack, part: str = ""):
        vars(self).update(models=models, stack=stack, part=part)

    models: Sequence[Any]
    stack: AnyStack
    part: str

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
    """The optimisers of all members of the group, also of those that do not take part."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        vars(self).update(optimizers=optimizers)

    optimizers: Sequence[Optimizer]


class GroupGraph(StandIn):
    """A graph of each client."""

    def __init__(self, graphs: Sequence[Graph]):
        vars(self).update(graphs=graphs)

    graphs: Sequence[Graph]

    @property
    def num_classes(self) -> int:
        """The number of classes, the same for all."""
        return self.graphs[0].num_classes


class GroupStreams(StandIn):
    """A random stream of each client."""

    def __init__(self, generators: Sequence[torch.Generator]):
        vars(self).update(generators=generators)

    generators: Sequence[torch.Generator]
