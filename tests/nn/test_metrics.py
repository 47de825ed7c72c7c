"""Scores against scikit-learn, losses against their formulas, and both for empty sets."""

import itertools
import math
from statistics import mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
)

from fedloom.experiments.report import comparison
from fedloom.nn.losses import cross_entropy
from fedloom.nn.metric_names import FROM_CONFUSION, METRICS, MINIMISED, PROBABILISTIC
from fedloom.nn.metrics import (
    ADDITIVE,
    ADDITIVE_MORE,
    UNDEFINED,
    additive_scores,
    all_scores,
    auc,
    average,
    confusion,
    mean_scores,
    names_of,
    per_class,
    probabilistic,
    scores,
)

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
        "balanced_accuracy": recall_score(
            true, predicted, labels=sorted(set(true)), average="macro", zero_division=0
        ),
    }
    labels = [1] if C == 2 else sorted(set(true))
    for name, score in (("precision", precision_score), ("recall", recall_score)):
        expected[name] = score(true, predicted, labels=labels, average="macro", zero_division=0)
    if C == 2 and 1 not in true:
        expected["recall"] = None
        if 1 not in predicted:
            expected["precision"] = None
    assert all(first is last is None for first, _, last in got.values())
    assert {name: value for name, (_, value, _) in got.items()} == pytest.approx(
        expected, abs=1e-12
    )


def test_scores_of_an_empty_matrix_are_none():
    empty = scores(torch.zeros(1, 3, 3, dtype=torch.int64))
    assert empty == {name: [None] for name in FROM_CONFUSION}
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


def test_balanced_accuracy_equals_scikit_learn():
    true, predicted = [0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 2, 0]
    (got,) = scores(torch.tensor(confusion_matrix(true, predicted))[None])["balanced_accuracy"]
    assert got == pytest.approx(balanced_accuracy_score(true, predicted))


# ---- metrics of probabilities ----
def metric(name, logits, y, mask=None, k=100):
    mask = torch.ones(len(y), dtype=torch.bool) if mask is None else mask
    value = dict(zip(PROBABILISTIC, probabilistic(logits, y, mask, k), strict=True))[name]
    return None if value == UNDEFINED else value


@examples
@given(predictions())
def test_pr_auc_equals_scikit_learn_also_with_ties(case):
    logits, y, mask = case
    p, true = logits[mask].double().softmax(1).numpy(), y[mask].numpy()
    classes = [1] if logits.shape[1] == 2 else sorted(set(true))
    areas = [average_precision_score(true == c, p[:, c]) for c in classes if c in true]
    expected = sum(areas) / len(areas) if areas else None
    assert metric("pr_auc", *case) == pytest.approx(expected, abs=1e-9)


def orders(score):
    """All orders of items by score, the highest first: items that tie in each order."""
    groups = [[i for i, s in enumerate(score) if s == v] for v in sorted(set(score), reverse=True)]
    for choice in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield [i for group in choice for i in group]


@examples
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_recall_and_precision_at_k_are_means_over_the_orders_of_ties(items):
    """The reference draws every order of items that tie."""
    score, positive = [float(s) for s, _ in items], [p for _, p in items]
    logits = torch.tensor([[0.0, s] for s in score])
    y = torch.tensor(positive).long()
    for k in (1, 2, 4, 100):
        top = min(k, len(items))
        hits = mean(sum(positive[i] for i in order[:top]) for order in orders(score))
        expected = hits / sum(positive) if any(positive) else None
        assert metric("recall_at_k", logits, y, k=k) == pytest.approx(expected)
        assert metric("precision_at_k", logits, y, k=k) == pytest.approx(hits / top)


def test_recall_at_k_is_not_defined_for_three_classes():
    for name in ("recall_at_k", "precision_at_k"):
        assert metric(name, torch.eye(3), torch.tensor([0, 1, 2])) is None
        assert metric(name, torch.eye(3)[:, :2], torch.tensor([0, 1, 1])) is not None


@examples
@given(predictions())
def test_ece_equals_a_loop_over_bins(case):
    logits, y, mask = case
    p, true = logits[mask].double().softmax(1), y[mask]
    confidence, label = p.max(1)
    total = 0.0
    for b in range(15):
        within = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if within.any():
            right = (label == true)[within].double().mean()
            total += within.double().mean() * (right - confidence[within].mean()).abs()
    assert metric("ece", *case) == pytest.approx(float(total), abs=1e-9)


def test_ece_of_certain_predictions_is_their_error_rate():
    logits = 100 * torch.eye(2)[torch.tensor([0, 0, 1, 1])]
    assert metric("ece", logits, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.0)
    assert metric("ece", logits, torch.tensor([0, 1, 1, 1])) == pytest.approx(0.25)


def test_probabilistic_metrics_without_positives_without_items_and_with_nan():
    logits, y = torch.eye(2)[[0, 1, 0]], torch.tensor([0, 0, 0])
    found = {name: metric(name, logits, y) for name in PROBABILISTIC}
    assert found["pr_auc"] is found["recall_at_k"] is None
    assert found["precision_at_k"] == 0
    assert found["ece"] > 0
    nothing = torch.zeros(3, dtype=torch.bool)
    assert all(metric(name, logits, y, nothing) is None for name in PROBABILISTIC)
    assert all(metric(name, logits * torch.nan, y) is None for name in PROBABILISTIC)
    everything = torch.ones(3, dtype=torch.bool)
    one = probabilistic(logits, y, everything, 2, ("ece",))
    assert [v == UNDEFINED for v in one] == [True, True, True, False]


# ---- tables of scores ----
def test_undefined_values_are_none_and_the_selected_metric_has_a_validation_value():
    val, test = torch.tensor([[[3, 1], [0, 0]]]), torch.tensor([[[5, 0], [2, 3]]])
    other = torch.tensor([[[-1.0, -1.0, -1.0, 0.25], [0.5, 1.0, 0.2, 0.1]]])
    areas = torch.tensor([[-1.0, 0.75]])
    found = all_scores(val, test, areas, other, selection="ece")
    assert tuple(found) == names_of("ece")
    assert found["val_ece"] == [0.25]
    assert found["val_accuracy"] == [0.75]
    assert found["auc"] == [0.75]
    assert all_scores(val, test, areas, other, selection="recall")["val_recall"] == [None]
    assert all_scores(val, test, areas, selection="pr_auc")["val_pr_auc"] == [None]
    assert "val_ece" not in all_scores(val, test, areas, other)


@pytest.mark.parametrize("selection", ["accuracy", "recall", "pr_auc"])
def test_sums_of_additive_scores_give_the_averages(selection):
    rng = torch.Generator().manual_seed(0)
    val, test = torch.randint(4, (2, 5, 2, 2), generator=rng)
    val[0], test[1, 1] = 0, 0
    areas, other = torch.rand(5, 2, generator=rng), torch.rand(5, 2, 4, generator=rng)
    areas[2, 1] = other[3, 0, 0] = UNDEFINED
    items = [3, 5, 8, 13, 21]
    columns = all_scores(val, test, areas, other, selection=selection)
    parts = [
        additive_scores({name: [column[k]] for name, column in columns.items()}, n)
        for k, n in enumerate(items)
    ]
    total, more = (sum(part[i] for part in parts) for i in range(2))
    assert (len(total), len(more)) == (len(ADDITIVE), len(ADDITIVE_MORE) + 1) == (6, 8)
    by_size, equal = mean_scores(total, more, selection)
    assert tuple(by_size) == tuple(equal) == names_of(selection)
    for name, column in columns.items():
        assert by_size[name] == pytest.approx(average(column, [float(n) for n in items]))
        assert equal[name] == pytest.approx(average(column, [1.0] * 5))


def test_scores_per_class_equal_scikit_learn():
    true, predicted = [0, 0, 0, 1, 1, 2], [0, 1, 0, 1, 1, 0]
    matrix = confusion_matrix(true, predicted, labels=range(4)).tolist()
    found = per_class(matrix, ("a", "b", "c", "d"))
    report = classification_report(true, predicted, output_dict=True, zero_division=0)
    for name, key in zip("ab", "01", strict=True):
        assert found[name]["support"] == report[key]["support"]
        for ours, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            assert found[name][ours] == pytest.approx(report[key][theirs])
    assert found["c"] == {"support": 1, "precision": None, "recall": 0.0, "f1": 0.0}
    assert found["d"] == {"support": 0, "precision": None, "recall": None, "f1": None}


def test_comparisons_know_the_same_metrics():
    assert set(comparison.METRICS) == {*METRICS, *(f"{name}_mean" for name in METRICS)}
    assert set(comparison.MINIMISED) == {*MINIMISED, *(f"{name}_mean" for name in MINIMISED)}


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
