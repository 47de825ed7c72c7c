"""The batched form of operations on edges: scores of learnt edge weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.sparse import Sparse
from fedloom.engines.stacked.graphs import GraphStack, StackedNoise, stack_of
from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.matmul import blockwise
from fedloom.engines.stacked.parameters import parameter_at, stacked_parameters
from fedloom.engines.stacked.tensors import split_rows
from fedloom.nn.edge_weights import EdgeEvaluator, EdgeNorm, edge_ends, edge_scores
from fedloom.nn.operations import Operation
from fedloom.nn.weights import slots_of, substituted


class BatchedEdgeScores(Batched):
    """Scores of the edges of several graphs, by evaluators of one form."""

    def key(self, *args: Any) -> Hashable:
        """Evaluators of one form, on graphs that have edges."""
        evaluator, graph, rng = args
        if type(graph) is not Graph or not isinstance(evaluator, EdgeEvaluator):
            return None
        if not graph.adjacency("sum").nnz:
            return None
        trained = [parameter_at(slot).requires_grad for slot in slots_of(evaluator)]
        return (evaluator.gcn.form, *trained, rng is None, graph.sparse_x is None)

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One evaluator with stacked parameters on a stack of graphs."""
        evaluators, graphs, streams = zip(*calls, strict=True)
        evaluator, parameters = evaluators[0], stacked_parameters(evaluators)
        stack = stack_of(graphs, context.group)
        noise = None if streams[0] is None else StackedNoise(streams, stack)
        with substituted(evaluator, parameters):
            h = evaluator.gcn.logits(evaluator.gcn.items(stack, noise), stack, noise)
            scores = _of_edges(evaluator, stack, h)
        return split_rows(scores, _edges_of(stack)[0])


def _of_edges(evaluator: EdgeEvaluator, stack: GraphStack, h: Tensor) -> Tensor:
    """Returns the scores of all edges [edges] from rows of nodes."""
    sizes, membership, ends = _edges_of(stack)
    both = torch.cat([evaluator.source.weight, evaluator.target.weight], 1).mT
    g = ends @ blockwise(h, both, stack.sizes).view(2 * len(h), -1)
    first, *norms = evaluator.norms
    g = F.relu(_normed(first, g, membership))
    for layer, norm in zip(evaluator.hidden, norms, strict=True):
        assert isinstance(layer.weight, Tensor)
        g = F.relu(_normed(norm, blockwise(g, layer.weight.mT, sizes), membership))
    weight, bias = evaluator.out.weight.squeeze(1), evaluator.out.bias
    last = membership.transpose @ torch.cat([weight, bias], 1)
    return (g * last[:, :-1]).sum(1) + last[:, -1]


def _normed(norm: Any, g: Tensor, membership: Sparse) -> Tensor:
    """Returns the output of `EdgeNorm` for the edges of each graph."""
    return _Normed.apply(g, norm.weight, norm.bias, membership)  # type: ignore[no-untyped-call]


class _Normed(torch.autograd.Function):
    """`EdgeNorm` of several graphs: [edges, width], and scale and shift [graphs, width]."""

    @staticmethod
    def forward(ctx, g, weight, bias, membership):  # type: ignore[no-untyped-def]
        count = membership.offsets.diff().unsqueeze(1)
        expand = membership.transpose
        centred = g - expand @ (membership @ g / count)
        variance = membership @ centred.square() / count
        inverse = expand @ (variance + EdgeNorm.EPS).rsqrt()
        ctx.membership, ctx.count = membership, count
        standard = centred.mul_(inverse)
        ctx.save_for_backward(standard, inverse, weight)
        return torch.addcmul(expand @ bias, standard, expand @ weight)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (standard, inverse, weight), membership = ctx.saved_tensors, ctx.membership
        expand = membership.transpose
        to_weight, to_bias = membership @ (gradient * standard), membership @ gradient
        # What the mean and the variance of a graph's edges pass on to each of them.
        by_mean, by_variance = (expand @ (weight * t / ctx.count) for t in (to_bias, to_weight))
        own = gradient * (expand @ weight)
        to_g = own.sub_(by_mean).sub_(standard * by_variance).mul_(inverse)
        return to_g, to_weight, to_bias, None


def _edges_of(stack: GraphStack) -> tuple[list[int], Sparse, Sparse]:
    """Returns the number of edges of each graph, and two matrices.

    They are [graphs, edges], which edges a graph has, and [edges, 2 · nodes], the ends of each
    edge: node i is column 2 i as a source and column 2 i + 1 as a target.
    """

    def make() -> tuple[list[int], Sparse, Sparse]:
        sizes = [part.adjacency("sum").nnz for part in stack.parts]
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        every, (source, target) = torch.arange(len(owner)), edge_ends(stack)
        columns = torch.cat([2 * source, 2 * target + 1])
        ones, width = torch.ones(2 * len(owner)), 2 * stack.num_nodes
        return (
            sizes,
            Sparse.from_edges(owner, every, ones[: len(owner)], (len(sizes), len(owner))),
            Sparse.from_edges(every.repeat(2), columns, ones, (len(owner), width)),
        )

    return stack.cached("edges of each graph", make)


EDGES: Mapping[Operation[Any, Any], Batched] = {edge_scores: BatchedEdgeScores()}
