"""Specs: how they are parsed, refused and initialised."""

from __future__ import annotations

import pytest
import torch
from tests.nn.small_models import CLASSES, FEATURES

from fedloom.errors import ConfigError
from fedloom.nn.architectures import ARCHITECTURES
from fedloom.nn.build import architectures, build_model, parse_spec
from fedloom.nn.model import Spec

NAMES = list(ARCHITECTURES)

each = pytest.mark.parametrize("name", NAMES)


def test_parse_spec() -> None:
    assert parse_spec("gcn") == Spec("gcn", 2, (64,))
    assert parse_spec("gcn-4x128") == Spec("gcn", 4, (128,))
    assert parse_spec("sgc-4") == Spec("sgc", 4, (64,))
    assert parse_spec("gcn-8x64+jk+linear") == Spec("gcn", 8, (64,), frozenset({"jk", "linear"}))
    assert parse_spec("dgcn") == Spec("dgcn", 2, (64,), frozenset({"norm"}))
    # One layer cannot be both extractor and head.
    assert parse_spec("gcn-1x8") == Spec("gcn", 1, (8,), frozenset({"linear"}))
    assert parse_spec("appnp-1x8") == Spec("appnp", 1, (8,))
    assert parse_spec("sage-2x128-64+linear") == Spec("sage", 2, (128, 64), frozenset({"linear"}))
    assert parse_spec("sage-2x128-64+linear").width == 64


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gcnn", "unknown model 'gcnn'. Did you mean 'gcn'? Valid: appnp, dgcn, gamlp, "),
        ("", "unknown model ''"),
        ("GCN", "Did you mean 'gcn'"),
        ("gcn-", "size '' is not LAYERS or LAYERSxWIDTH"),
        ("gcn-0x64", "e.g. 'gcn-2x64'"),
        ("gcn-2x0", "size '2x0'"),
        ("gcn-x128", "size 'x128'"),
        ("gcn-two", "size 'two'"),
        ("gcn--2", "size '-2'"),
        ("gcn-2x64 ", "size '2x64 '"),
        ("gcn-²", "size '²'"),
        (
            "gcn+jkk",
            "unknown option of model 'gcn' 'jkk'. Did you mean 'jk'? Valid: jk, linear, norm",
        ),
        ("gcn+", "unknown option of model 'gcn' ''"),
        ("sgc-2+jk", "unknown option of model 'sgc' 'jk'"),
        ("gat-2x60", "model width 60: gat has 8 heads"),
        ("gcn-3x16-", "size '3x16-'"),
        ("gcn-2x16-8", "model width '16-8': gcn has 1 hidden layers here, give one width or 1"),
        ("sgc-2x16-8", "only message passing without +jk can have layers of different widths"),
        ("gcn-3x16-8+jk", "only message passing without +jk"),
    ],
)
def test_a_wrong_spec_is_refused(spec: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(spec, FEATURES, CLASSES, seed=0)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_wrong_dropout_is_refused(p: float) -> None:
    with pytest.raises(ConfigError, match="dropout is"):
        build_model("gcn", FEATURES, CLASSES, dropout=p, seed=0)


def test_layers_of_different_widths() -> None:
    shapes = {
        name: tuple(p.shape)
        for name, p in build_model(
            "sage-2x9-5+linear", FEATURES, CLASSES, seed=0
        ).named_parameters()
    }
    assert shapes["layers.0.weight"] == (FEATURES, 9)
    assert shapes["layers.1.neighbour"] == (9, 5)
    assert shapes["classifier.weight"] == (5, CLASSES)
    same = zip(
        build_model("gcn-3x7", FEATURES, CLASSES, seed=3).parameters(),
        build_model("gcn-3x7-7", FEATURES, CLASSES, seed=3).parameters(),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in same)


def test_architectures_have_one_line_descriptions() -> None:
    listed = architectures()
    assert list(listed) == NAMES
    assert len(listed) == 12
    assert all(text and "\n" not in text for text in listed.values())


@each
def test_initialisation(name: str) -> None:
    one, same, other = (
        build_model(f"{name}-2x64", 300, CLASSES, seed=seed).state_dict() for seed in (4, 4, 5)
    )
    for key, value in one.items():
        assert torch.equal(value, same[key])
        if value.dim() == 2:
            bound = (6 / sum(value.shape)) ** 0.5
            assert value.abs().max() <= bound
            assert not torch.equal(value, other[key])
            if value.numel() > 1000:
                assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        else:
            assert value.unique().tolist() in ([0.0], [1.0])
