"""Builds a model from a spec.

A spec is `name[-LAYERS[xWIDTH]][+option...]`, for example "gcn", "sgc-4", "gcn-4x128",
"gcn-8x64+jk" or "sage-2x256+norm+linear". LAYERS is the number of graph layers, or of hops if
features or predictions are smoothed. WIDTH is the width of the hidden layers. Message passing also
accepts one width per hidden layer ("sage-2x128-64+linear", "gcn-3x128-64"). The last width is that
of the embedding. Options:

    +linear  the head is one linear map, the same for every architecture; only the extractor uses
             the edges
    +norm    LayerNorm on the input features
    +jk      jumping knowledge: the embedding is the maximum over the extractor's layers

In a graph-level task, the extractor ends with pooling the nodes of each graph, and the head is
linear.

A user's own torch module is named `file.py:Class`, or `file.py` if that has one module class
(`fedloom.nn.own_model`).

There is no training flag. Dropout is applied if and only if a `torch.Generator` is passed as `rng`,
and it draws only from that generator. There is no BatchNorm: its running statistics are private
data, and averaging them over parties breaks them. LayerNorm replaces it.
"""

from __future__ import annotations

import re
from functools import cache

from torch import Generator, nn

from fedloom.data.graph import Task
from fedloom.errors import ConfigError, unknown
from fedloom.nn.architectures import ARCHITECTURES, LayeredModel
from fedloom.nn.model import Model, Spec
from fedloom.nn.own_model import build_own, is_own, own_spec


def architectures() -> dict[str, str]:
    """Returns the name and a one-line description of every architecture."""
    return {name: str(model.__doc__).splitlines()[0] for name, model in ARCHITECTURES.items()}


def split_specs(text: str) -> list[str]:
    """Returns the specs of a text such as "gcn,gat-2x32". The clients get them in turn."""
    parts = [part.strip() for part in text.split(",")]
    return [part if is_own(part) else part.lower() for part in parts]


def parse_spec(spec: str) -> Spec:
    """Returns the parts of a spec, or raises a ConfigError that names the wrong part.

    A user's own model has one part, its name. The width of its embedding is known once it is built.
    """
    return Spec(own_spec(spec)) if is_own(spec) else _parsed(spec)


@cache
def _parsed(spec: str) -> Spec:
    """Returns the parts of a spec of fedloom's own architectures."""
    head, *options = spec.split("+")
    name, dash, size = head.partition("-")
    if name not in ARCHITECTURES:
        raise unknown("model", name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    for option in options:
        if option not in architecture.accepts:
            raise unknown(f"option of model {name!r}", option, architecture.accepts)
    numbers = re.fullmatch(
        r"([1-9]\d*)(?:x([1-9]\d*(?:-[1-9]\d*)*))?", size if dash else "2", re.ASCII
    )
    if numbers is None:
        raise ConfigError(
            f"model {spec!r}: size {size!r} is not LAYERS or LAYERSxWIDTH, both at least 1, "
            f"e.g. '{name}-2x64'"
        )
    layers, widths = int(numbers[1]), tuple(int(width) for width in (numbers[2] or "64").split("-"))
    if len(widths) > 1 and (not issubclass(architecture, LayeredModel) or "jk" in options):
        raise ConfigError(
            f"model {spec!r}: only message passing without +jk can have layers of different "
            "widths; give one width"
        )
    return Spec(name, layers, widths, frozenset(options) | architecture.implied_options(layers))


def build_model(
    spec: str,
    num_features: int,
    num_classes: int,
    task: Task = "node",
    *,
    dropout: float = 0.5,
    seed: int,
) -> Model:
    """Returns a new model. The same arguments give the same parameters.

    The global random state is neither read nor changed. Matrices are uniform in
    ±√(6 / (in + out)), as in Glorot & Bengio (AISTATS 2010) and in PyG. Vectors start at 0 or 1.

    Args:
        spec: The model's spec; see the top of this module.
        num_features: Number of node features.
        num_classes: Number of classes.
        task: "node" or "graph".
        dropout: The probability of dropout.
        seed: The seed of the initial parameters.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout is {dropout}, must be at least 0 and below 1, e.g. 0.5")
    if is_own(spec):
        return build_own(own_spec(spec), num_features, num_classes, task, dropout, seed)
    parts = parse_spec(spec)
    model = ARCHITECTURES[parts.name](parts, num_features, num_classes, task, dropout)
    rng = Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.xavier_uniform_(parameter, generator=rng)
    return model
