"""Scores against scikit-learn, losses against their formulas, and both for empty sets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, roc_auc_score

from fedloom.nn.losses import cross_entropy
from fedloom.nn.metrics import UNDEFINED, auc, average, confusion, scores

examples = settings(max_examples=60, deadline=None)


@st.composite
def predictions(draw):
    """Logits, labels and a mask.

    The logits have few distinct rows, so that many items tie. Labels may leave classes out. The
    mask contains at least one item.
    """
    C, n = draw(st.integers(2, 5)), draw(st.integers(1, 25))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(6, C, generator=rng)[torch.randint(6, (n,), generator=rng)]
    y = torch.randint(C, (n,), generator=rng)
    mask = torch.rand(n, generator=rng) < 0.7
    mask[0] = True
    return logits, y, mask


@examples
@given(predictions())
def test_scores_equal_scikit_learn(case):
    logits, y, mask = case
    C = logits.shape[1]
    true, predicted = y[mask].numpy(), logits[mask].argmax(1).numpy()
    matrix = confusion(*case, C)
    assert matrix.dtype == torch.int64
    assert (matrix.numpy() == confusion_matrix(true, predicted, labels=range(C))).all()
    empty = torch.zeros_like(matrix)
    got = scores(torch.stack([empty, matrix, empty]))
    expected = {
        "accuracy": accuracy_score(true, predicted),
        "f1_macro": f1_score(true, predicted, labels=range(C), average="macro", zero_division=0),
        "f1_present": f1_score(
            true, predicted, labels=sorted(set(true)), average="macro", zero_division=0
        ),
        "f1_weighted": f1_score(
            true, predicted, labels=range(C), average="weighted", zero_division=0
        ),
    }
    assert all(first is last is None for first, _, last in got.values())
    assert {name: value for name, (_, value, _) in got.items()} == pytest.approx(
        expected, abs=1e-12
    )


def test_scores_of_an_empty_matrix_are_none():
    empty = scores(torch.zeros(1, 3, 3, dtype=torch.int64))
    assert empty == {name: [None] for name in ("accuracy", "f1_macro", "f1_present", "f1_weighted")}
    no_items = torch.zeros(4, dtype=torch.bool)
    assert confusion(torch.ones(4, 3), torch.tensor([0, 1, 2, -1]), no_items, 3).sum() == 0


@examples
@given(predictions())
def test_auc_is_the_mean_over_classes_that_have_positive_and_negative_items(case):
    logits, y, mask = case
    probability, true = logits[mask].softmax(1).numpy(), y[mask].numpy()
    mixed = [c for c in range(logits.shape[1]) if 0 < (true == c).sum() < len(true)]
    expected = [roc_auc_score(true == c, probability[:, c]) for c in mixed]
    assert auc(*case) == pytest.approx(
        sum(expected) / len(expected) if expected else UNDEFINED, abs=1e-9
    )


def test_auc_of_three_classes_and_of_two_equals_scikit_learn():
    rng = torch.Generator().manual_seed(4)
    y, all_items = torch.arange(30) % 3, torch.ones(30, dtype=torch.bool)
    logits = torch.randn(30, 3, generator=rng) + torch.eye(3)[y]
    expected = roc_auc_score(y, logits.double().softmax(1), multi_class="ovr", average="macro")
    assert auc(logits, y, all_items) == pytest.approx(expected, abs=1e-6)
    two = (y > 0).long()
    assert auc(logits[:, :2], two, all_items) == pytest.approx(
        roc_auc_score(two, logits[:, 1] - logits[:, 0]), abs=1e-6
    )


@pytest.mark.parametrize("y", [[0, 0, 0], [1, 1, 1]])
def test_auc_of_a_single_class_is_undefined(y):
    assert auc(torch.eye(3), torch.tensor(y), torch.ones(3, dtype=torch.bool)) == UNDEFINED
    assert auc(torch.eye(3), torch.tensor(y), torch.zeros(3, dtype=torch.bool)) == UNDEFINED
    assert math.isfinite(UNDEFINED)  # messages carry only finite numbers
    assert UNDEFINED < 0  # no area is negative


def test_auc_distinguishes_confident_predictions():
    logits = torch.tensor([[0.0, 20.0], [0.0, 25.0], [0.0, 30.0], [0.0, 1.0]])
    assert auc(logits, torch.tensor([0, 1, 1, 0]), torch.ones(4, dtype=torch.bool)) == 1.0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_equals_its_formula_over_the_mask(reduction):
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    y, mask = torch.tensor([0, -1, 2, 1, -1]), torch.tensor([True, False, True, True, False])
    terms = [
        -math.log(math.exp(logits[i, y[i]]) / sum(math.exp(v) for v in logits[i]))
        for i in (0, 2, 3)
    ]
    assert cross_entropy(logits, y, mask, reduction).item() == pytest.approx(
        sum(terms) / (3 if reduction == "mean" else 1), rel=1e-5
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_of_an_empty_mask_is_zero_with_a_zero_gradient(reduction):
    W = torch.randn(4, 3, requires_grad=True, generator=torch.Generator().manual_seed(0))
    loss = cross_entropy(
        torch.ones(5, 4) @ W, torch.full((5,), -1), torch.zeros(5, dtype=torch.bool), reduction
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(W.grad, torch.zeros(4, 3))


def test_averages_skip_missing_values():
    assert average([0.5, None, 1.0], [1.0, 100.0, 3.0]) == pytest.approx(0.875)
    assert average([None, None], [1.0, 2.0]) is None
    assert average([], []) is None
    assert average([0.0, 1.0], [1.0, 1.0]) == 0.5
    assert average([0.3], [0.0]) is None
    with pytest.raises(ValueError, match="zip"):
        average([1.0], [1.0, 2.0])
