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
    sizes, membership = _edges_of(stack)
    source, target = edge_ends(stack)
    both = torch.cat([evaluator.source.weight, evaluator.target.weight], 1).mT
    of_source, of_target = blockwise(h, both, stack.sizes).chunk(2, 1)
    g = of_source.index_select(0, source) + of_target.index_select(0, target)
    first, *norms = evaluator.norms
    g = F.relu(_normed(first, g, membership))
    for layer, norm in zip(evaluator.hidden, norms, strict=True):
        g = F.relu(_normed(norm, blockwise(g, layer.weight.mT, sizes), membership))
    weight, bias = evaluator.out.weight.squeeze(1), evaluator.out.bias
    last = membership.transpose @ torch.cat([weight, bias], 1)
    return (g * last[:, :-1]).sum(1) + last[:, -1]


def _normed(norm: Any, g: Tensor, membership: Sparse) -> Tensor:
    """Returns the output of `EdgeNorm` for the edges of each graph."""
    count = membership.offsets.diff().unsqueeze(1)
    mean = membership @ g / count
    centred = g - membership.transpose @ mean
    variance = membership @ centred.square() / count
    scale = (variance + EdgeNorm.EPS).rsqrt() * norm.weight
    expanded = membership.transpose @ torch.cat([scale, norm.bias], 1)
    by, shift = expanded.chunk(2, 1)
    return torch.addcmul(shift, centred, by)


def _edges_of(stack: GraphStack) -> tuple[list[int], Sparse]:
    """Returns the number of edges of each graph, and the matrix [graphs, edges] of its edges."""

    def make() -> tuple[list[int], Sparse]:
        sizes = [part.adjacency("sum").nnz for part in stack.parts]
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        every = torch.arange(len(owner))
        ones = torch.ones(len(owner))
        return sizes, Sparse.from_edges(owner, every, ones, (len(sizes), len(owner)))

    return stack.cached("edges of each graph", make)


EDGES: Mapping[Operation[Any, Any], Batched] = {edge_scores: BatchedEdgeScores()}
