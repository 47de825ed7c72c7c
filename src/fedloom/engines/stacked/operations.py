"""The batched form of forward passes, losses, steps, loading weights and scores.

`BATCHED` lists every operation that has a batched form. `terms`, `prototypes`, `links` and `edges`
have those of the objectives of single methods.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.data.graph import Graph
from fedloom.data.sparse import Sparse
from fedloom.engines.stacked import tensors
from fedloom.engines.stacked.divergence import BatchedWeightedDivergence
from fedloom.engines.stacked.edges import EDGES
from fedloom.engines.stacked.encoder import BatchedEncoding
from fedloom.engines.stacked.generated import BatchedGeneratedLoss
from fedloom.engines.stacked.graphs import StackedNoise, stack_of
from fedloom.engines.stacked.group_operations import confusion_matrices
from fedloom.engines.stacked.label_steps import BatchedLabelSteps
from fedloom.engines.stacked.links import LINKS
from fedloom.engines.stacked.lockstep import Batched, Context
from fedloom.engines.stacked.parameters import (
    clear_gradients,
    hand_out_gradients,
    parameter_at,
    parameters_of,
    position_of,
    stacked_parameters,
    tensor_of_rows,
)
from fedloom.engines.stacked.prototypes import PROTOTYPES
from fedloom.engines.stacked.tensors import common_source, join_rows, split_rows
from fedloom.engines.stacked.terms import TERMS
from fedloom.nn import losses, metrics, training
from fedloom.nn.architectures import ARCHITECTURES, GAT
from fedloom.nn.augment import View
from fedloom.nn.edge_weights import EdgeWeighted
from fedloom.nn.encoder import encode_rows
from fedloom.nn.mended import Mended
from fedloom.nn.model import (
    Model,
    embed,
    embed_and_head,
    forward,
    forward_with,
    generated_loss,
    head,
)
from fedloom.nn.operations import Operation
from fedloom.nn.weights import load_weights, slots_of, substituted


class BatchedPass(Batched):
    """A pass through models of one form: one model with stacked parameters on a stack of graphs."""

    def __init__(self, operation: Operation[Any, Any]):
        self.through = operation.function

    def key(self, *args: Any) -> Hashable:
        """Architectures of fedloom with equal specs, on graphs or views of one kind."""
        model, graph, rng, *begun = args
        data = graph.whole if isinstance(graph, View | EdgeWeighted) else graph
        features = data.real if isinstance(data, Mended) and data.factors is not None else data
        if (
            type(features) is not Graph
            or type(model) not in ARCHITECTURES.values()
            or (isinstance(graph, EdgeWeighted) and isinstance(model, GAT))  # it needs their edges
            or data.x.requires_grad
        ):
            return None
        if begun and len(begun[0]) != graph.num_items:
            return None  # embeddings of another graph
        trained = [parameter_at(slot).requires_grad for slot in slots_of(model)]
        kind = (rng is None, type(graph), features is data, features.sparse_x is None)
        return (model.form, *trained, *kind)

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """Stacked parameters on a stack of graphs."""
        models, graphs, streams, *rest = zip(*calls, strict=True)
        joined = [join_rows(r) for r in rest]
        return self.on_stack(
            models[0], stacked_parameters(models), graphs, streams, context, *joined
        )

    def on_stack(
        self,
        model: Model,
        parameters: Mapping[str, Tensor],
        graphs: Sequence[Graph],
        streams: Sequence[Any],
        context: Context,
        *rest: Tensor,
    ) -> list[Tensor]:
        """One model with the given parameters, stacked or not, on many graphs."""
        stack = stack_of(graphs, context.group)
        noise = None if streams[0] is None else StackedNoise(streams, stack)
        with substituted(model, parameters):
            out = self.through(model, stack, noise, *rest)
        return self.divided(out, stack.item_sizes)

    def divided(self, out: Any, sizes: list[int]) -> list[Any]:
        """Divides the output into that of each client. sizes: the number of each one's items."""
        return split_rows(out, sizes)


class BatchedOutputs(BatchedPass):
    """A pass that gives embeddings and logits."""

    def __init__(self) -> None:
        super().__init__(embed_and_head)

    def divided(self, out: Any, sizes: list[int]) -> list[Any]:
        """Returns each client's embeddings and logits."""
        return list(zip(*(split_rows(rows, sizes) for rows in out), strict=True))


class BatchedForwardWith(BatchedPass):
    """A pass through models with weights that are not their own."""

    def __init__(self) -> None:
        super().__init__(forward)

    def key(self, *args: Any) -> Hashable:
        """As for other passes; the weights are complete and need no gradient."""
        model, graph, weights = args
        if any(tensor.requires_grad for tensor in weights.values()):
            return None
        if weights.keys() != {name for _, _, name in slots_of(model)}:
            return None
        return super().key(model, graph, None)

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """If all clients hold copies of the same weights: one model on a stack of graphs."""
        models, graphs, weights = zip(*calls, strict=True)
        columns = {name: [of_client[name] for of_client in weights] for name in weights[0]}
        sources = {name: common_source(column) for name, column in columns.items()}
        shared = {name: source for name, source in sources.items() if source is not None}
        own = {}
        if len(shared) < len(columns):
            own = {name: torch.stack(column) for name, column in columns.items()}
        return self.on_stack(models[0], own or shared, graphs, [None], context)


class BatchedLoad(Batched):
    """Overwrites the parameters of several models."""

    def key(self, *args: Any) -> Hashable:
        """Models whose parameters are rows of the same stacks."""
        model, new = args
        own = {slot[2]: parameter_at(slot) for slot in slots_of(model)}
        if own.keys() != new.keys() or any(p.shape != new[name].shape for name, p in own.items()):
            return None
        return tuple(position[:2] if (position := position_of(p)) else None for p in own.values())

    @torch.no_grad()
    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[None]:
        """One copy per parameter."""
        models, news = zip(*calls, strict=True)
        for j, (_, _, name) in enumerate(slots_of(models[0])):
            rows = [parameter_at(slots_of(model)[j]) for model in models]
            received = [new[name] for new in news]
            tensor, source = tensor_of_rows(rows), common_source(received)
            if tensor is not None:
                tensor.copy_(torch.stack(received) if source is None else source)
            else:
                for row, value in zip(rows, received, strict=True):
                    row.copy_(value)
        return [None] * len(calls)


class BatchedTrainingLoss(Batched):
    """Cross-entropy over the training items of several graphs."""

    def key(self, *args: Any) -> Hashable:
        """Calls that reduce alike, all with class weights or all without."""
        logits, _, reduction, of_class = args
        if reduction not in ("mean", "sum"):
            return None
        return reduction, logits.shape[1], of_class is None

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One cross-entropy of all items, summed or averaged per client by a sparse product."""
        logits, graphs, reductions, of_class = zip(*calls, strict=True)

        def make() -> tuple[Tensor, Tensor, Sparse]:
            train, y = torch.cat([g.train for g in graphs]), torch.cat([g.y for g in graphs])
            counts = torch.tensor([int(g.train.sum()) for g in graphs])
            owner = torch.repeat_interleave(torch.arange(len(graphs)), counts)
            share = torch.ones(len(owner)) if reductions[0] == "sum" else 1.0 / counts[owner]
            if of_class[0] is not None:
                share = torch.stack(of_class)[owner, y[train]]
                if reductions[0] == "mean":
                    share = share / torch.zeros(len(graphs)).index_add(0, owner, share)[owner]
            items = torch.arange(len(owner))
            gather = Sparse.from_edges(owner, items, share, (len(graphs), len(owner)))
            return train.nonzero().flatten(), y[train], gather

        purpose = f"{reductions[0]} over training items"
        weights = () if of_class[0] is None else of_class
        rows, y, gather = context.group.cached(purpose, (*graphs, *weights), make)
        each = F.cross_entropy(join_rows(logits).index_select(0, rows), y, reduction="none")
        return split_rows((gather @ each.unsqueeze(1)).squeeze(1))


class BatchedHeldOut(Batched):
    """Confusion matrices of several graphs' validation and test items."""

    def key(self, *args: Any) -> Hashable:
        """Graphs with the same number of classes."""
        return args[1].num_classes

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[Tensor]:
        """One count of all cells of all matrices."""
        logits, graphs = zip(*calls, strict=True)
        return list(confusion_matrices(context.group, join_rows(logits), graphs).unbind())


class _Differentiation(Batched):
    """A backward pass through joint tensors: for all clients at once, when all are ready."""

    waits = True

    def key(self, *args: Any) -> Hashable:
        """All calls fit together."""
        return True

    def single(
        self, operation: Operation[Any, Any], args: tuple[Any, ...], context: Context
    ) -> Any:
        """A batch of one: what it differentiates may have been computed for several clients."""
        (result,) = self.batch([args], context)
        return result


class BatchedStep(_Differentiation):
    """Steps of several optimisers down the gradients of their losses."""

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[None]:
        """One backward pass and, where parameters are stacked, one step of a joint optimiser."""
        optimizers, roots = zip(*calls, strict=True)
        stacked = context.group.optimizer_of(optimizers) if len(calls) > 1 else None
        if stacked is not None:
            stacked.clear()
        else:
            clear_gradients(map(parameters_of, optimizers))
        tensors.backward(roots, [None] * len(roots), keep=context.others_running)
        if stacked is None or not stacked.step():
            hand_out_gradients(map(parameters_of, optimizers))
            for optimizer in optimizers:
                optimizer.step()
        return [None] * len(calls)


class BatchedBackward(_Differentiation):
    """Backward passes that add to the gradients of several clients' parameters."""

    def batch(self, calls: Sequence[tuple[Any, ...]], context: Context) -> list[None]:
        """One backward pass."""
        parameters, roots, gradients = zip(*calls, strict=True)
        clear_gradients(parameters, rows=False)
        tensors.backward(roots, gradients, keep=context.others_running)
        hand_out_gradients(parameters)
        return [None] * len(calls)


BATCHED: Mapping[Operation[Any, Any], Batched] = {
    embed: BatchedPass(embed),
    head: BatchedPass(head),
    forward: BatchedPass(forward),
    embed_and_head: BatchedOutputs(),
    forward_with: BatchedForwardWith(),
    generated_loss: BatchedGeneratedLoss(),
    encode_rows: BatchedEncoding(),
    load_weights: BatchedLoad(),
    losses.training_loss: BatchedTrainingLoss(),
    losses.weighted_divergence: BatchedWeightedDivergence(),
    metrics.held_out: BatchedHeldOut(),
    training.label_steps: BatchedLabelSteps(),
    training.step: BatchedStep(),
    training.backward_pass: BatchedBackward(),
    **EDGES,
    **LINKS,
    **PROTOTYPES,
    **TERMS,
}
