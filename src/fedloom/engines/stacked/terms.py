"""The batched form of terms of objectives: distillation and contrasts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.matmul import NARROW
from fedloom.engines.stacked.graphs import GraphStack, stack_of
from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.matmul import outer_product, split
from fedloom.engines.stacked.tensors import join_rows, split_rows
from fedloom.nn import contrast, distillation, losses
from fedloom.nn.operations import Operation


def block_sums(h: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the sum of each block of a vector [rows], [blocks]; differentiable.

    sizes: the number of rows of each block.
    """
    return torch.segment_reduce(h, "sum", lengths=torch.tensor(sizes), unsafe=True)


def log_softmax(h: Tensor) -> Tensor:
    """Returns the logarithm of the softmax of each row.

    With few columns, PyTorch takes 25 times as long for rows as for columns.
    """
    return h.t().contiguous().log_softmax(0).t() if h.shape[1] < NARROW else h.log_softmax(1)


class _OfRows(Batched):
    """A function of tensors that have the same rows."""

    def key(self, *args: Any) -> Hashable:
        """Tensors of equally many columns; of each client, as many rows in all of them."""
        if len({len(rows) for rows in args}) > 1:
            return None
        return tuple(rows.shape[1:] for rows in args)


class BatchedMean(_OfRows):
    """A mean over rows, such as a divergence.

    of_row: takes the tensors of all clients and returns a number for each row.
    """

    def __init__(self, of_row: Callable[..., Tensor]):
        self.of_row = of_row

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One number for each row of all clients, averaged by client."""
        columns = list(zip(*calls, strict=True))
        sizes = [len(rows) for rows in columns[0]]
        each = self.of_row(*map(join_rows, columns))
        return split_rows(block_sums(each, sizes) / torch.tensor(sizes))


def _divergences(teacher: Tensor, student: Tensor) -> Tensor:
    log_p, log_q = log_softmax(teacher.detach()), log_softmax(student)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _squared_errors(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).square().mean(1)


def _entropies(logits: Tensor) -> Tensor:
    log_p = log_softmax(logits)
    return -(log_p.exp() * log_p).sum(1)


class BatchedProbabilities(_OfRows):
    """The softmax of several clients' rows."""

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One softmax of all rows."""
        logits = [own for (own,) in calls]
        return split_rows(log_softmax(join_rows(logits)).exp(), [len(own) for own in logits])


class BatchedHSIC(_OfRows):
    """HSIC of several clients' outputs."""

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One product oneᵀ (other − its mean) per client."""
        one, other = map(join_rows, zip(*calls, strict=True))
        sizes = [len(own) for own, _ in calls]
        count = torch.tensor(sizes)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), count)
        mean = torch.segment_reduce(other, "sum", lengths=count, unsafe=True) / count.unsqueeze(1)
        products = outer_product(one, other - mean.index_select(0, owner), sizes)
        return split_rows((products / count.view(-1, 1, 1)).square().sum((1, 2)))


class _OnGraphs(Batched):
    """A term of a graph, of tensors with a row for each of its items, and of constants."""

    def key(self, *args: Any) -> Hashable:
        """Tensors of equal form, and equal constants."""
        described: list[Hashable] = []
        for value in args:
            if isinstance(value, Graph):
                if type(value) is not Graph:
                    return None
            else:
                described.append(value.shape[1:] if isinstance(value, Tensor) else value)
        return tuple(described)

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One computation on the stack of graphs."""
        joined: list[Any] = []
        for column in zip(*calls, strict=True):
            if isinstance(column[0], Graph):
                joined.append(stack_of(column, context.group))
            else:
                joined.append(join_rows(column) if isinstance(column[0], Tensor) else column[0])
        return split_rows(self.on_stack(context, *joined))

    @abstractmethod
    def on_stack(self, context: Context, *args: Any) -> Tensor:
        """Returns the term of each graph, [graphs]."""


class BatchedNeighbourly(_OnGraphs):
    """The neighbourly loss of several graphs."""

    def on_stack(self, context: Context, *args: Any) -> Tensor:
        """One product with the block-diagonal adjacency."""
        stack, teacher, student, norm = args
        adjacency = stack.adjacency("sum")

        def make() -> tuple[Tensor, Tensor, Tensor]:
            """How often each node is taught and teaches, and Q of each graph."""
            ones = torch.ones(len(teacher), 1)
            taught, teaches = adjacency @ ones + 1, adjacency.transpose @ ones + 1
            pairs = torch.stack([block.sum() for block in split(taught, stack.sizes)])
            Q = pairs if norm == "pairs" else torch.tensor(stack.sizes)
            return taught.squeeze(1), teaches.squeeze(1), Q

        taught, teaches, Q = stack.cached(("neighbourly", norm), make)
        log_a = log_softmax(teacher.detach())
        a = log_a.exp()
        gathered = (adjacency @ a).add_(a)
        known = (a * log_a).sum(1) * teaches
        # Σ_c g_c log b_c = Σ_c g_c z_c − (Σ_c g_c) log Σ e^z, and Σ_c g_c is `taught`.
        lacking = student.logsumexp(1) * taught - (gathered * student).sum(1)
        return block_sums(known + lacking, stack.sizes) / Q


class BatchedStructure(_OnGraphs):
    """The distillation of neighbourhoods of several graphs."""

    def on_stack(self, context: Context, *args: Any) -> Tensor:
        """The edges of all graphs at once."""
        f, f_global, stack, omega = args
        degrees, counts = stack.cached("degrees", lambda: _degrees(stack))
        each = distillation.structure_by_edge(f, f_global, stack, omega)
        return block_sums(each, degrees) / counts


def _degrees(stack: GraphStack) -> tuple[list[int], Tensor]:
    """Returns the number of edges of each graph, and of its nodes with neighbours, 1 at least."""
    parts = [part.adjacency("sum") for part in stack.parts]
    with_neighbours = [max(int((part.offsets.diff() > 0).sum()), 1) for part in parts]
    return [part.nnz for part in parts], torch.tensor(with_neighbours)


class BatchedContrast(_OnGraphs):
    """Contrasts between the classes of several graphs' training nodes."""

    PAIRS = 2**22  # of nodes, the most that are computed at once

    def key(self, *args: Any) -> Hashable:
        """As other terms. A graph with many training nodes runs alone."""
        return None if int(args[0].train.sum()) > contrast.ROWS else super().key(*args)

    def on_stack(self, context: Context, *args: Any) -> Tensor:
        """Products of padded blocks of training nodes, [graphs, most nodes, most nodes]."""
        stack, z, anchors, tau = args
        rows, y, places, sizes, padding = context.group.cached(
            "training nodes", stack.parts, lambda: _training_nodes(stack)
        )
        K, T = padding.shape
        z, anchors = (distillation.unit(h.index_select(0, rows)) for h in (z, anchors))
        C = stack.num_classes
        sums = z.new_zeros(K * C, z.shape[1]).index_add(0, y, anchors)
        count = torch.bincount(y, minlength=K * C).clamp(min=1).unsqueeze(1)
        near = (z * (sums / count).index_select(0, y)).sum(1) / tau
        if K * T * T > self.PAIRS:
            blocks = zip(split(z, sizes), split(anchors, sizes), strict=True)
            divisor = torch.cat([contrast.divisor(*block, tau) for block in blocks])
        else:
            padded, others = (
                h.new_zeros(K * T, h.shape[1]).index_copy(0, places, h).view(K, T, -1)
                for h in (z, anchors)
            )
            similar = torch.baddbmm(padding.unsqueeze(1), padded, others.mT, alpha=1 / tau)
            divisor = similar.logsumexp(2).flatten().index_select(0, places)
        return block_sums(divisor - near, sizes) / torch.tensor(sizes).clamp(min=1)


def _training_nodes(stack: GraphStack) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
    """Returns the training nodes of a stack.

    These are: their rows, their classes (numbered through all graphs), their places in padded
    blocks, their number in each graph, and a matrix [graphs, most nodes] that is -inf where a block
    is padded.
    """
    sizes = [int(part.train.sum()) for part in stack.parts]
    rows = torch.cat([part.train for part in stack.parts]).nonzero().flatten()
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = torch.cat([part.y[part.train] for part in stack.parts]) + owner * stack.num_classes
    most = max(sizes)
    inside = torch.arange(most) < torch.tensor(sizes).unsqueeze(1)
    padding = torch.zeros(len(sizes), most).masked_fill(~inside, -torch.inf)
    return rows, y, inside.flatten().nonzero().flatten(), sizes, padding


TERMS: Mapping[Operation[Any, Any], Batched] = {
    distillation.divergence: BatchedMean(_divergences),
    distillation.squared_error: BatchedMean(_squared_errors),
    distillation.neighbourly: BatchedNeighbourly(),
    distillation.structure: BatchedStructure(),
    contrast.class_contrast: BatchedContrast(),
    losses.probabilities: BatchedProbabilities(),
    losses.entropy: BatchedMean(_entropies),
    losses.hsic: BatchedHSIC(),
}
