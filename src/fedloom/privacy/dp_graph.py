"""Nodes, edges and labels: how much one of them can change a sum of clipped gradients.

A graph network mixes nodes: if one node or edge goes, the gradients of all training nodes around it
change. With edges capped (`fedloom.data.capping`), their number is bounded:

    unit    neighbours differ in                               sensitivity of Σ clip(g_v, C)
    label   the label of one training node                     2 C
    edge    one undirected edge                                2 C · 4 B
    node    one node of at most D edges, with its label,       C + 2 C · 2 D B
            features and edges

Here D is the cap and B = 1 + D + D(D-1) + ... the most nodes within r steps of a node. If a layer
divides by the degrees of both ends (gcn, sgc), r is the number of layers; if it looks at the
neighbours only (sage, gat, gin), it is one less. docs/differential-privacy.md has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.facts import Facts
from fedloom.core.privacy_terms import PrivacyTerms
from fedloom.errors import ConfigError
from fedloom.nn.build import parse_spec

# How much farther than its neighbours a layer looks: their degrees.
LAYERS = {"gcn": 1, "sgc": 1, "sage": 0, "gat": 0, "gin": 0}
WITHOUT_EDGES = "mlp"


def nodes_within(steps: int, degree: int) -> int:
    """Returns the most nodes within some steps of a node, itself included.

    Args:
        steps: The number of steps, from 0.
        degree: The most edges of a node.
    """
    return 1 + sum(degree * (degree - 1) ** k for k in range(steps))


def affected(unit: str, steps: int, degree: int) -> int:
    """Returns how many other training nodes' outputs a neighbouring graph can change.

    Args:
        unit: "node", "edge" or "label".
        steps: r; see above. -1: the outputs do not depend on edges.
        degree: The most edges of a node, D.
    """
    if unit == "label" or steps < 0:
        return 0
    ends = 4 if unit == "edge" else 2 * degree  # nodes whose edges change
    return ends * nodes_within(steps, degree)


def steps_of(spec: str) -> int:
    """Returns r of a model; -1 if it uses no edges.

    Raises a ConfigError if it is not known how far the model looks.
    """
    parts = parse_spec(spec)
    if parts.name == WITHOUT_EDGES:
        return -1
    if parts.name not in LAYERS:
        valid = ", ".join((WITHOUT_EDGES, *LAYERS))
        raise ConfigError(
            f"model {spec!r}: with run.dp_unit node, edge or label it must be known how far a "
            f"model looks; valid: {valid}"
        )
    return parts.layers - 1 + LAYERS[parts.name]


def gradient_sensitivity(facts: Facts) -> float:
    """Returns the sensitivity of the sum of clipped gradients of all training nodes.

    Raises a ConfigError if nothing depends on what is to be protected.
    """
    terms = facts.privacy
    assert terms is not None
    if facts.task != "node":
        raise ConfigError(
            f"run.dp_unit is {terms.unit!r}, the data are a graph task; valid: client"
        )
    own = {"label": 2.0, "edge": 0.0, "node": 1.0}[terms.unit]
    steps = max(steps_of(spec) for spec in facts.models)
    total = terms.clip * (own + 2 * affected(terms.unit, steps, terms.degree))
    return require_some(total, terms)


def require_some(change: float, terms: PrivacyTerms) -> float:
    """Returns a sensitivity; raises a ConfigError if it is 0: there is nothing to protect."""
    if not change:
        raise ConfigError(
            f"run.dp_unit is {terms.unit!r}, but nothing that clients send depends on it with this "
            "model and these settings: there is nothing to protect"
        )
    return change


def clipped_gradients(losses: Tensor, parameters: Sequence[Tensor], clip: float) -> list[Tensor]:
    """Returns the sum of the losses' gradients, each clipped to a length.

    Args:
        losses: The loss of each training node, [nodes].
        parameters: What the gradients are of.
        clip: C.
    """
    total = [torch.zeros_like(p) for p in parameters]
    for loss in losses:
        gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
        length = torch.stack([g.double().square().sum() for g in gradient]).sum().sqrt()
        scale = (clip * (1 - 2.0**-20) / length.clamp(min=1e-30)).clamp(max=1.0).float()
        for sum_, g in zip(total, gradient, strict=True):
            sum_.add_(g * scale)
    return total
