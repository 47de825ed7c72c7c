"""Twelve architectures. Each is an *extractor* (node features to `width` columns) and a *head* (those to class logits).

    message passing        mlp · gcn · gat · sage · gin · gcnii
    features smoothed      sgc · ssgc · sign · gamlp
    predictions smoothed   appnp · dgcn

A model is named by a spec, `name[-LAYERS[xWIDTH]][+option...]`: "gcn", "sgc-4", "gcn-4x128", "gcn-8x64+jk", "sage-2x256+norm+linear".
LAYERS counts graph layers, or hops where features or predictions are smoothed. In message passing WIDTH may be one for every hidden layer
("sage-2x128-64+linear", "gcn-3x128-64"); the last is the embedding's. Options:

    +linear  the head is one linear map, the same for every architecture; all work on the graph is the extractor's
    +norm    LayerNorm on the input features
    +jk      jumping knowledge: the embedding is the maximum over the extractor's layers

In a graph-level task the extractor ends with pooling the nodes of every graph, and the head is linear.

There is no training flag. Noise is drawn if and only if a `torch.Generator` is passed as `rng`, and from that generator only. There
is no BatchNorm: its running statistics are private data, and averaging them over parties breaks them; LayerNorm stands in.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.errors import ConfigError, unknown
from fedloom.families import slots_of, stacked, using
from fedloom.graph import SPARSE_FEATURES_BELOW, Graph, Task
from fedloom.sparse import Sparse, weighted
from fedloom.stack import Streams, common, joined, parted
from fedloom.together import Operation
from fedloom.views import View, stack_of

# W ↦ h W. A layer asks nothing else of its input h, so h may be a tensor or features that are never made dense.
Product = Callable[[Tensor], Tensor]
Noise: TypeAlias = Generator | Streams


# ---- noise ----


def dropout(h: Tensor, p: float, rng: Noise | None) -> Tensor:
    """h with a share p of its entries zeroed and the rest scaled up; h itself without `rng` (Srivastava et al., JMLR 2014).

    p is rounded to 256ths and the scale fits the rounded value, so the expectation is exactly h. One 64-bit draw serves eight
    entries: a mask takes a quarter to an eighth of `bernoulli_`'s time.
    """
    cut = min(round(256 * p), 255)
    if rng is None or cut == 0:
        return h
    # Compared as floats, in place: comparing bytes, or multiplying by a bool, takes several times as long.
    keep = random_bytes(h, rng).to(h.dtype).ge_(cut)
    return h * keep.mul_(256 / (256 - cut))


def random_bytes(h: Tensor, rng: Noise) -> Tensor:
    """Uniform bytes in h's shape."""
    if isinstance(rng, Streams):
        return rng.bytes_like(h)
    draws = torch.empty((h.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=rng)
    return draws.view(torch.uint8)[: h.numel()].view(h.shape)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The greater of two, entry by entry. Where they are equal the gradient is a's; `torch.maximum` halves it, in ten times the time."""
    return a + F.relu(b - a)


# ---- smoothing: polynomials of S, an adjacency with self-loops ----


def polynomial(graph: Graph, h: Tensor, coefficients: tuple[float, ...], kind: str = "sym") -> Tensor:
    """Σ_k c_k S^k h, by Horner's rule: takes [nodes, width], c_0 ... c_K; gives [nodes, width] after K products with S."""
    *lower, top = coefficients
    out = h if top == 1 else top * h
    for c in reversed(lower):
        out = graph.propagate(out, kind)
        if c:
            out = torch.add(out, h, alpha=c)
    return out


def power(k: int) -> tuple[float, ...]:
    """The coefficients of S^k."""
    return (0.0,) * k + (1.0,)


def propagated(graph: Graph, kind: str, hops: int) -> list[Tensor]:
    """[X, SX, ..., S^hops X] for the graph's raw features, kept on the graph."""
    known: list[Tensor] = graph.once(("propagated", kind), lambda: [graph.x])
    while len(known) <= hops:
        known.append(graph.propagate(known[-1], kind))
    return known[: hops + 1]


def smoothed(graph: Graph, coefficients: tuple[float, ...]) -> Tensor:
    """Σ_k c_k S^k X for the graph's raw features, [nodes, features], kept on the graph; the hops below are not."""
    first, *higher = coefficients

    def make() -> Tensor:
        # Without X itself it is one step from what begins one hop earlier, which models that look at every hop have asked for just before.
        before = graph._known.get(("smoothed", tuple(higher))) if first == 0 else None
        return polynomial(graph, graph.x, coefficients) if before is None else graph.propagate(before)

    return graph.once(("smoothed", coefficients), make)


def keep_smoothed(graph: Graph, hops: int) -> bool:
    """Whether to multiply by kept features, (S^K X) W, rather than to smooth the product, S^K (X W).

    Per column of W the first takes a dense product with nodes × features entries, the second sparse ones with nnz(X) + K nnz(S)
    entries, each as costly as 1 / SPARSE_FEATURES_BELOW dense ones. Dense features: always keep. Bag-of-words: rarely. A graph that is
    seen once: never.
    """
    if graph.fleeting:
        return False
    if graph.sparse_x is None:
        return True
    entries = graph.sparse_x.nnz + hops * graph.adjacency("sym").nnz
    return entries > SPARSE_FEATURES_BELOW * graph.x.numel()


# ---- layers: (input as a Product, graph) -> [nodes, num_out] ----
# Weights are [in, out], as the papers write h W: `graph.project` needs them so. Matrices are filled in by `build`, in one place.


class Dense(nn.Module):
    """h W + b. `last` tells a layer that it gives logits, which only some layers heed."""

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """Takes the input's product and the graph, gives [nodes, num_out]."""
        return self.shifted(times(self.weight), graph)

    def of_features(self, model: Model, graph: Graph) -> Tensor:
        """The layer's output if it is the model's first."""
        return self(model.features(graph), graph)

    def shifted(self, h: Tensor, graph: Graph) -> Tensor:
        """h + b."""
        return graph.shift(h, self.bias)


class Convolution(Dense):
    """GCN's layer: S (h W) + b with S = D̃^-1/2 (A+I) D̃^-1/2."""

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        return self.shifted(graph.propagate(times(self.weight)), graph)

    def of_features(self, model: Model, graph: Graph) -> Tensor:
        """(S X) W + b, with S X kept where that is quicker."""
        return self.shifted(model.features(graph, power(1))(self.weight), graph)


class MeanNeighbour(Dense):
    """GraphSAGE's layer: h W + D^-1 A (h U) + b."""

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        super().__init__(num_in, num_out)
        self.neighbour = nn.Parameter(torch.empty(num_in, num_out))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        return self.shifted(times(self.weight) + graph.propagate(times(self.neighbour), "mean"), graph)


class SumNeighbour(Dense):
    """GIN's layer: MLP((1 + ε) h + A h); the MLP is linear, LayerNorm (the paper: BatchNorm), ReLU, linear."""

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        # The inner layer is never as narrow as the classes: few classes would starve it.
        super().__init__(num_in, num_in if last else num_out)
        self.eps = nn.Parameter(torch.zeros(1))
        self.norm = Norm(len(self.bias))
        self.outer = Dense(len(self.bias), num_out)

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        h = times(self.weight)  # the sum is linear, so W may come first, where it makes h narrow
        inner = F.relu(self.norm(self.shifted((1 + graph.spread(self.eps, h)) * h + graph.propagate(h, "sum"), graph), graph))
        return self.outer(graph.product(inner), graph)


class Norm(nn.Module):
    """LayerNorm (Ba et al., 2016)."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor, graph: Graph) -> Tensor:
        """Takes and gives [nodes, width]."""
        return F.layer_norm(h, h.shape[-1:]) * graph.spread(self.weight, h) + graph.spread(self.bias, h)


class Attention(Dense):
    """GAT's layer: Σ_j α_ij (h W)_j + b with α_ij ∝ exp LeakyReLU(s·(h W)_j + t·(h W)_i), over i's in-neighbours j and i itself.

    Eight heads side by side, each with num_out / 8 columns; the last layer has one head. Edge weights are not looked at.
    """

    HEADS = 8

    def __init__(self, num_in: int, num_out: int, last: bool = False):
        heads = 1 if last else self.HEADS
        if num_out % heads:
            raise ConfigError(f"model width {num_out}: gat has {heads} heads, use a multiple of {heads}, e.g. 'gat-2x64'")
        super().__init__(num_in, num_out)
        self.source = nn.Parameter(torch.empty(heads, num_out // heads))
        self.target = nn.Parameter(torch.empty(heads, num_out // heads))

    def forward(self, times: Product, graph: Graph) -> Tensor:
        """As `Dense`."""
        edges = graph.adjacency("sym")  # its entries are the edges and self-loops
        source, target = graph.once("edges", lambda: (edges.indices.long(), edges.rows))
        flat = times(self.weight)
        s_and_t = torch.cat([by_head(self.source), by_head(self.target)], -1)
        sent, taken = graph.product(flat)(s_and_t).t().contiguous().chunk(2)  # [heads, nodes]: s·h and t·h
        h = flat.unflatten(1, self.source.shape[-2:]).transpose(0, 1).contiguous()  # [heads, nodes, columns]
        score = F.leaky_relu(sent.index_select(1, source).add_(taken.index_select(1, target)), 0.2)
        # A softmax over each target's edges. What is taken off first is no variable; exp then neither overflows nor vanishes.
        off = F.leaky_relu(taken + level(sent, source, target), 0.2).detach()
        share = score.sub_(off.index_select(1, target)).exp_()
        # A column of ones beside h adds up the shares.
        gathered, total = weighted(edges, share, F.pad(h, (0, 1), value=1.0)).split([h.shape[2], 1], 2)
        return self.shifted((gathered / total).transpose(0, 1).flatten(1), graph)


def by_head(vectors: Tensor) -> Tensor:
    """Takes [..., heads, columns], gives the matrix [..., heads · columns, heads] that multiplies every head's columns with its vector."""
    apart = torch.eye(vectors.shape[-2]).unsqueeze(1)  # [heads, 1, heads]
    return (vectors.unsqueeze(-1) * apart).flatten(-3, -2)


def level(sent: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """What is near to all that a target's sources send: the middle of what all nodes send, or its own sources' maximum if that is far.

    Takes [heads, nodes] and the edges' ends, gives [heads, 1 or nodes]. Near is 60: exp(60) is well inside float32.
    """
    if not sent.shape[1]:
        return sent  # a graph without nodes
    low, high = sent.detach().aminmax(dim=1, keepdim=True)
    if (high - low).max() < 120:
        return (low + high) / 2
    lowest = torch.full_like(sent, -torch.inf)
    return lowest.scatter_reduce(1, target.expand(len(sent), -1), sent.detach().index_select(1, source), "amax")


class InitialResidual(nn.Module):
    """GCNII's layer: (1-β) m + β m W with m = (1-α) S h + α h_0."""

    def __init__(self, width: int, alpha: float, beta: float):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, h: Tensor, h_0: Tensor, graph: Graph) -> Tensor:
        """Takes the last layer's and the first layer's output and the graph, gives [nodes, width]."""
        m = torch.lerp(graph.propagate(h), h_0, self.alpha)
        return torch.lerp(m, graph.product(m)(self.weight), self.beta)


class InputNorm(nn.Module):
    """LayerNorm of the input features, then a product: LN(X) W (Ba et al., 2016).

    LN(X) W = X̂ (γ∘W) + β W, where X̂ is constant. Sparse features stay sparse: X̂ V = (X V - mean · 1ᵀV) / deviation.
    """

    def __init__(self, num_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, graph: Graph, weight: Tensor) -> Tensor:
        """Takes a graph and a [features, width] tensor, gives [nodes, width]."""
        scaled = self.weight.unsqueeze(-1) * weight
        if graph.sparse_x is None:
            standard: Tensor = graph.once("standardised features", lambda: F.layer_norm(graph.x, graph.x.shape[1:]))
            out = graph.product(standard)(scaled)
        else:
            mean, deviation = graph.once("feature moments", lambda: _moments(graph.x))
            out = graph.project(scaled)
            out = (out - mean * graph.spread(scaled.sum(-2), out)) / deviation
        return out + graph.spread((self.bias.unsqueeze(-2) @ weight).squeeze(-2), out)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    if not len(x):
        return x.new_zeros(0, 1), x.new_ones(0, 1)  # `var_mean` warns of nothing to take it of
    variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return mean, (variance + 1e-5).sqrt()


# ---- what all models have in common ----


@dataclass(frozen=True)
class Spec:
    """A parsed model name: "gcn-4x128+linear" is Spec("gcn", 4, (128,), frozenset({"linear"}))."""

    name: str
    layers: int = 2
    widths: tuple[int, ...] = (64,)  # of every hidden layer, or of each
    options: frozenset[str] = frozenset()

    @property
    def width(self) -> int:
        """The embedding's width."""
        return self.widths[-1]


class Model(nn.Module, ABC):
    """An extractor and a head. Built by `build`.

    The head's parameters are those whose names start with "classifier."; all others belong to the extractor. The state is the
    parameters alone (float32), there are no buffers. A subclass says what its layers are and what they give for every node.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"linear", "norm"})
    pooling: ClassVar[str] = "mean"

    @classmethod
    def implied(cls, layers: int) -> frozenset[str]:
        """The options that come with this architecture and depth, asked for or not."""
        return frozenset()

    def __init__(self, spec: Spec, num_features: int, num_classes: int, task: Task, dropout: float):
        super().__init__()
        self.spec, self.width, self.task, self.dropout = spec, spec.width, task, dropout
        # Equal for models that differ in their parameters alone; a text, which knows its hash.
        self.form = f"{spec} {num_features} {num_classes} {task} {dropout}"
        # Whether all work on the graph is the extractor's: logits of pooled graphs have no edges to travel on.
        self.linear = task == "graph" or "linear" in spec.options
        self.norm = InputNorm(num_features) if "norm" in spec.options else None
        self.layers = nn.ModuleList(self.extractor(num_features))
        self.classifier = self.last(num_classes)

    @abstractmethod
    def extractor(self, num_features: int) -> list[nn.Module]:
        """The extractor's layers."""

    @abstractmethod
    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """What the extractor gives for every node: [nodes, width]."""

    def last(self, num_classes: int) -> nn.Module:
        """The head's layer."""
        return Dense(self.width, num_classes)

    def features(self, graph: Graph, coefficients: tuple[float, ...] = (1.0,)) -> Product:
        """The model's input as a product: W ↦ (Σ_k c_k S^k X) W, the quickest way; X is normalised with +norm."""
        project = graph.project if self.norm is None else partial(self.norm, graph)
        if len(coefficients) == 1:
            return project
        # What +norm gives is never kept: it changes as γ and β learn.
        if self.norm is None and keep_smoothed(graph, len(coefficients) - 1):
            return graph.product(smoothed(graph, coefficients))
        return lambda weight: polynomial(graph, project(weight), coefficients)

    def items(self, graph: Graph, rng: Noise | None) -> Tensor:
        """What the extractor gives for every item: [items, width]."""
        h = self.nodes(graph, rng)
        return h if self.task == "node" else _pool(graph, self.pooling) @ h

    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """What the head gives for every item: [items, classes]."""
        return self.classifier(graph.product(dropout(z, self.dropout, rng)), graph)

    # What others call. Clients who call the same in step have it done once for all of them.
    def embed(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes a graph, gives its items' embeddings [items, width]."""
        return EMBED(self, graph, rng)

    def head(self, z: Tensor, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes embeddings [items, width] and their graph, gives logits [items, classes]."""
        return HEAD(self, graph, rng, z)

    def forward(self, graph: Graph, rng: Generator | None = None) -> Tensor:
        """Takes a graph, gives its items' logits [items, classes]."""
        return FORWARD(self, graph, rng)


def _pool(graph: Graph, how: str) -> Sparse:
    def make() -> Sparse:
        batch = graph.batch
        assert batch is not None, "a graph-level model got a graph without `batch`"
        size = torch.bincount(batch, minlength=graph.num_items)
        share = 1.0 / size[batch] if how == "mean" else torch.ones(len(batch))
        return Sparse.from_edges(batch, torch.arange(len(batch)), share, (graph.num_items, len(batch)))

    return graph.once(("pool", how), make)


# ---- one model, or many at once ----


class Pass(Operation):
    """A pass through a model: takes the model, a graph, noise, and what the pass begins with if it begins inside."""

    def __init__(self, through: Callable[..., Tensor]):
        self.through = through

    def alone(self, *args: Any) -> Tensor:
        """One model's."""
        return self.through(*args)

    def alike(self, *args: Any) -> Hashable:
        """Models of one kind, on graphs of one kind. Of what is not this package's own nothing is known."""
        net, graph, rng, *begun = args
        data = graph.whole if type(graph) is View else graph
        if type(data) is not Graph or type(net) not in KINDS or data.x.requires_grad:
            return None
        if begun and len(begun[0]) != graph.num_items:
            return None  # embeddings that are not this graph's
        trained = [held[name].requires_grad for held, name, _ in slots_of(net)]
        return (net.form, *trained, rng is None, data is graph, data.sparse_x is None)

    def together(self, calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
        """Stacked models on a stack of graphs."""
        nets, graphs, streams, *rest = zip(*calls, strict=True)
        return self.on_stack(nets[0], stacked(nets), graphs, streams, *(joined(r) for r in rest))

    def on_stack(
        self, net: Model, parameters: Mapping[str, Tensor], graphs: Sequence[Graph], streams: Sequence[Any], *rest: Tensor
    ) -> list[Tensor]:
        """A pass through one model with the given parameters, stacked or not, on many graphs; gives each graph's part."""
        stack = stack_of(graphs)
        with using(net, parameters):
            out = self.through(net, stack, None if streams[0] is None else Streams(streams, stack), *rest)
        return parted(out, stack.item_sizes)


EMBED = Pass(lambda net, graph, rng: net.items(graph, rng))
HEAD = Pass(lambda net, graph, rng, z: net.logits(z, graph, rng))
FORWARD = Pass(lambda net, graph, rng: net.logits(net.items(graph, rng), graph, rng))


class Applied(Pass):
    """A pass through a model with weights that are not its own: takes the model, a graph, and the weights by name."""

    def __init__(self) -> None:
        super().__init__(FORWARD.through)

    def alone(self, *args: Any) -> Tensor:
        """One model's."""
        net, graph, weights = args
        with using(net, weights):
            return net(graph)

    def alike(self, *args: Any) -> Hashable:
        """As for any pass."""
        net, graph, weights = args
        if any(tensor.requires_grad for tensor in weights.values()) or weights.keys() != {name for _, _, name in slots_of(net)}:
            return None
        return super().alike(net, graph, None)

    def together(self, calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
        """If all have copies of the same weights, one model on a stack of graphs."""
        nets, graphs, weights = zip(*calls, strict=True)
        columns = {name: [of_client[name] for of_client in weights] for name in weights[0]}
        shared = {name: source for name, column in columns.items() if (source := common(column)) is not None}
        own = {name: torch.stack(column) for name, column in columns.items()} if len(shared) < len(columns) else {}
        return self.on_stack(nets[0], own or shared, graphs, [None])


applied = Applied()


# ---- message passing ----


class LayerByLayer(Model):
    """One kind of layer, repeated: what the next five share. Dropout is on the input of every layer but the first."""

    accepts = Model.accepts | {"jk"}
    layer: ClassVar[type[Dense]]

    @classmethod
    def implied(cls, layers: int) -> frozenset[str]:
        """The head takes the last layer; a single one stays with the extractor, or there would be no embedding."""
        return frozenset({"linear"} if layers == 1 else ())

    def extractor(self, num_features: int) -> list[nn.Module]:
        """LAYERS layers, less the one that is the head."""
        depth = self.spec.layers - (not self.linear)
        widths = self.spec.widths if len(self.spec.widths) > 1 else self.spec.widths * depth
        if len(widths) != depth:
            given = "-".join(map(str, widths))
            raise ConfigError(f"model width {given!r}: {self.spec.name} has {depth} hidden layers here, give one width or {depth}")
        return [self.layer(*sizes) for sizes in pairwise((num_features, *widths))]

    def last(self, num_classes: int) -> nn.Module:
        """One more layer of the kind, unless the head is to be linear."""
        return super().last(num_classes) if self.linear else self.layer(self.width, num_classes, last=True)

    def activation(self, h: Tensor) -> Tensor:
        """What follows every layer of the extractor; h is overwritten."""
        return h.relu_()

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """The last layer's output, or with +jk the maximum over all layers'."""
        first, *others = self.layers
        assert isinstance(first, Dense)
        outputs = [self.activation(first.of_features(self, graph))]
        for layer in others:
            outputs.append(self.activation(layer(graph.product(dropout(outputs[-1], self.dropout, rng)), graph)))
        return reduce(maximum, outputs) if "jk" in self.spec.options else outputs[-1]


class MLP(LayerByLayer):
    """Linear layers with ReLU between them, blind to edges."""

    layer = Dense


class GCN(LayerByLayer):
    """Graph convolutions, S h W with S = D̃^-1/2 (A+I) D̃^-1/2 (Kipf & Welling, ICLR 2017)."""

    layer = Convolution


class GAT(LayerByLayer):
    """Attention over neighbours, 8 heads side by side, ELU (Veličković et al., ICLR 2018; no dropout on the attention)."""

    layer = Attention

    def activation(self, h: Tensor) -> Tensor:
        """ELU, as in the paper."""
        return F.elu_(h)


class SAGE(LayerByLayer):
    """Own features and the mean of the neighbours', each with its weights (GraphSAGE: Hamilton et al., NeurIPS 2017)."""

    layer = MeanNeighbour


class GIN(LayerByLayer):
    """An MLP on (1 + ε) h plus the sum of the neighbours' h; sum pooling (Xu et al., ICLR 2019)."""

    layer = SumNeighbour
    pooling = "sum"


class GCNII(Model):
    """Deep convolutions that keep a share of the first layer and of the identity (Chen et al., ICML 2020)."""

    ALPHA, THETA = 0.1, 0.5  # the paper's α and λ for citation graphs

    def extractor(self, num_features: int) -> list[nn.Module]:
        """A linear layer, then LAYERS convolutions with β_l = log(θ/l + 1)."""
        betas = [math.log(self.THETA / l + 1) for l in range(1, self.spec.layers + 1)]
        return [Dense(num_features, self.width), *(InitialResidual(self.width, self.ALPHA, beta) for beta in betas)]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """h_0 = ReLU(X W + b), then h = ReLU(layer(h, h_0))."""
        first, *others = self.layers
        h = h_0 = F.relu(first(self.features(graph), graph))
        for layer in others:
            h = F.relu(layer(dropout(h, self.dropout, rng), h_0, graph))
        return h


# ---- features smoothed: LAYERS = K hops ----


class SGC(Model):
    """S^K X W, linear throughout (Wu et al., ICML 2019), with W in two factors so that there is an embedding."""

    def extractor(self, num_features: int) -> list[nn.Module]:
        """One linear map of the smoothed features."""
        return [Dense(num_features, self.width)]

    def coefficients(self) -> tuple[float, ...]:
        """c_0 ... c_K of the polynomial that smooths the features."""
        return power(self.spec.layers)

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """(Σ_k c_k S^k X) W + b."""
        return self.layers[0](self.features(graph, self.coefficients()), graph)


class SSGC(SGC):
    """SGC with all hops averaged: (α X + (1-α)/K Σ_k S^k X) W (Zhu & Koniusz, ICLR 2021)."""

    ALPHA = 0.05  # the paper's

    def coefficients(self) -> tuple[float, ...]:
        """α, then (1-α)/K for every hop."""
        return (self.ALPHA,) + ((1 - self.ALPHA) / self.spec.layers,) * self.spec.layers


class SIGN(Model):
    """A two-layer MLP on all hops side by side, [X ‖ SX ‖ ... ‖ S^K X] (Frasca et al., 2020; joined first, as O-pFGL does)."""

    def extractor(self, num_features: int) -> list[nn.Module]:
        """One linear map of the K + 1 hops side by side."""
        return [Dense((self.spec.layers + 1) * num_features, self.width)]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """ReLU(Σ_k S^k X W_k + b)."""
        hops = [self.features(graph, power(k)) for k in range(self.spec.layers + 1)]

        def side_by_side(weight: Tensor) -> Tensor:
            return reduce(torch.add, [times(part) for times, part in zip(hops, weight.chunk(len(hops), -2), strict=True)])

        return F.relu(self.layers[0](side_by_side, graph))


class GAMLP(Model):
    """Every node's own attention over hops, against a reference made of all of them (JK form: Zhang et al., KDD 2022)."""

    def extractor(self, num_features: int) -> list[nn.Module]:
        """One linear map a hop (the authors' `pre_process`, there an MLP), the reference's, and the attention's."""
        hops, width = self.spec.layers + 1, self.width
        return [*(Dense(num_features, width) for _ in range(hops)), Dense(hops * width, width), Dense(2 * width, 1)]

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """ReLU(Σ_k α_k H_k), H_k = S^k X W_k + b_k, α = softmax_k σ(a·[R ‖ H_k]), R = ReLU([H_0 ‖ ... ‖ H_K] U)."""
        *each, reference, score = self.layers
        H = torch.stack([layer(self.features(graph, power(k)), graph) for k, layer in enumerate(each)], 1)
        R = dropout(F.relu(reference(graph.product(H.flatten(1)), graph)), self.dropout, rng)
        # σ and not ReLU (the authors offer both): what is the same for all hops, as R is, cancels in a softmax of linear pieces.
        delta = torch.sigmoid(score(graph.product(torch.cat([R.unsqueeze(1).expand_as(H), H], 2)), graph))
        return F.relu((delta.softmax(1) * H).sum(1))


# ---- predictions smoothed: LAYERS = K hops ----


class APPNP(Model):
    """A two-layer MLP, its predictions spread by personalised PageRank with K steps (Gasteiger et al., ICLR 2019)."""

    ALPHA = 0.1  # the paper's teleport probability for citation graphs
    kind: ClassVar[str] = "sym"

    def extractor(self, num_features: int) -> list[nn.Module]:
        """The MLP's first layer."""
        return [Dense(num_features, self.width)]

    def coefficients(self) -> tuple[float, ...]:
        """K steps of z ← (1-α) S z + α h, written out: α (1-α)^k, and (1-α)^K for the last."""
        stay = 1 - self.ALPHA
        return (*(self.ALPHA * stay**k for k in range(self.spec.layers)), stay**self.spec.layers)

    def nodes(self, graph: Graph, rng: Noise | None) -> Tensor:
        """ReLU(X W + b), spread here if the head must not."""
        h = F.relu(self.layers[0](self.features(graph), graph))
        return polynomial(graph, h, self.coefficients(), self.kind) if self.linear else h

    def logits(self, z: Tensor, graph: Graph, rng: Noise | None) -> Tensor:
        """The MLP's second layer, then the spreading: it is cheaper over classes than over `width` columns."""
        logits = super().logits(z, graph, rng)
        return logits if self.linear else polynomial(graph, logits, self.coefficients(), self.kind)


class DGCN(APPNP):
    """Decoupled GCN: LayerNorm, a two-layer MLP, K steps of D̃^-1 (A+I) (FedStruct: Aliakbari et al., ICLR 2025)."""

    kind = "row"

    @classmethod
    def implied(cls, layers: int) -> frozenset[str]:
        """The LayerNorm."""
        return frozenset({"norm"})

    def coefficients(self) -> tuple[float, ...]:
        """The K-th power alone."""
        return power(self.spec.layers)


ARCHITECTURES: dict[str, type[Model]] = {
    model.__name__.lower(): model for model in (MLP, GCN, GAT, SAGE, GIN, GCNII, SGC, SSGC, SIGN, GAMLP, APPNP, DGCN)
}
KINDS = frozenset(ARCHITECTURES.values())


# ---- from a name to a model ----


def models() -> dict[str, str]:
    """Every architecture's name and one-line description."""
    return {name: str(model.__doc__).splitlines()[0] for name, model in ARCHITECTURES.items()}


def parse(spec: str) -> Spec:
    """Takes "name[-LAYERS[xWIDTH]][+option...]", gives its parts, or raises a ConfigError that names the wrong one."""
    head, *options = spec.split("+")
    name, dash, size = head.partition("-")
    if name not in ARCHITECTURES:
        raise unknown("model", name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    for option in options:
        if option not in architecture.accepts:
            raise unknown(f"option of model {name!r}", option, architecture.accepts)
    numbers = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*(?:-[1-9]\d*)*))?", size if dash else "2", re.ASCII)
    if numbers is None:
        raise ConfigError(f"model {spec!r}: size {size!r} is not LAYERS or LAYERSxWIDTH, both at least 1, e.g. '{name}-2x64'")
    layers, widths = int(numbers[1]), tuple(int(width) for width in (numbers[2] or "64").split("-"))
    if len(widths) > 1 and (not issubclass(architecture, LayerByLayer) or "jk" in options):
        raise ConfigError(f"model {spec!r}: only message passing without +jk can have layers of different widths; give one width")
    return Spec(name, layers, widths, frozenset(options) | architecture.implied(layers))


def build(spec: str, num_features: int, num_classes: int, task: Task = "node", *, dropout: float = 0.5, seed: int) -> Model:
    """A fresh model: the same for the same arguments. The global random state is neither read nor changed.

    Matrices are drawn as Glorot & Bengio (AISTATS 2010) and PyG do, uniform in ±√(6 / (in + out)); vectors start at 0 or 1.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout is {dropout}, must be at least 0 and below 1, e.g. 0.5")
    parts = parse(spec)
    model = ARCHITECTURES[parts.name](parts, num_features, num_classes, task, dropout)
    rng = Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.xavier_uniform_(parameter, generator=rng)
    return model
