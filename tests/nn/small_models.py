"""Small graphs and models that the tests of fedloom.nn share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedloom.data.graph import Graph
from fedloom.nn.build import build_model
from fedloom.nn.model import Model

FEATURES, CLASSES, ITEMS = 20, 5, 6


def random_graph(
    task: str = "node", *, directed: bool = False, sparse: bool = False, features: int = FEATURES
) -> Graph:
    """Returns a graph with 24 nodes and random edges. Two nodes are isolated.

    The graph-level task has six graphs of four nodes each.
    """
    rng = Generator().manual_seed(1)
    x = torch.randn(24, features, generator=rng)
    if sparse:
        x = x * (torch.rand(x.shape, generator=rng) < 0.08)
        x[3] = 0
    wanted = torch.rand(24, 24, generator=rng) < (0.15 if task == "node" else 0.6)
    batch = torch.arange(24) // 4
    if task == "graph":
        wanted &= batch[:, None] == batch
    wanted.fill_diagonal_(False)
    wanted[[5, 6]] = False
    wanted[:, [5, 6]] = False
    edges = (wanted if directed else wanted | wanted.T).nonzero().T
    items = 24 if task == "node" else ITEMS
    y = torch.randint(CLASSES, (items,), generator=rng)
    graph = Graph(
        x=x, edge_index=edges, y=y, num_classes=CLASSES, batch=None if task == "node" else batch
    )
    assert (graph.sparse_x is not None) == sparse
    return graph.check()


def made(name: str, task: str = "node", seed: int = 0, **settings: float) -> Model:
    """Returns a model with random biases and scales, so that swapping two of them is noticed."""
    model = build_model(name, FEATURES, CLASSES, task, seed=seed, **settings)  # type: ignore[arg-type]
    rng = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=rng)
    return model


def rng(seed: int = 0) -> Generator:
    """Returns a seeded generator."""
    return Generator().manual_seed(seed)


def gradients(model: Model, graph: Graph, **noise: Generator) -> list[Tensor]:
    """Returns the gradient of the cross-entropy in every parameter."""
    return list(
        torch.autograd.grad(
            F.cross_entropy(model(graph, **noise), graph.y), list(model.parameters())
        )
    )


def loaded(module: nn.Module, **state: Tensor) -> nn.Module:
    """Loads a state into a module. `__` in a keyword stands for a dot."""
    module.load_state_dict({key.replace("__", "."): value for key, value in state.items()})
    return module


def linear(layer: nn.Module) -> nn.Module:
    """Returns a layer of h W + b as PyTorch's `Linear`."""
    return loaded(nn.Linear(*layer.weight.shape), weight=layer.weight.T, bias=layer.bias)
