"""Classes and features of a party are brought into the agreed order by their names."""

import numpy as np
import pytest
import torch

from fedloom.data.graph import Graph
from fedloom.deploy.agreement import read_agreement
from fedloom.deploy.keys import make_party
from fedloom.deploy.names import align_classes, align_features
from fedloom.errors import ConfigError, DataError

AGREED = ("ok", "fraud")


def graph(y=(0, 1, -1, 0), classes=(), features=(), **more):
    x = torch.arange(float(len(y) * 2)).view(-1, 2)
    edges = torch.tensor([[0, 1], [1, 0]])
    count = len(classes) or max(y) + 1
    return Graph(
        x, edges, torch.tensor(y), count, class_names=classes, feature_names=features, **more
    )


# ---- classes ----
def test_classes_in_another_order_are_renumbered_by_name():
    own = graph(classes=("fraud", "ok"))
    aligned = align_classes(own, AGREED, 2, "party")
    names = [AGREED[c] if c >= 0 else None for c in aligned.y.tolist()]
    assert names == ["fraud", "ok", None, "fraud"]
    assert (aligned.class_names, aligned.num_classes) == (AGREED, 2)


def test_a_party_may_lack_a_class():
    aligned = align_classes(graph(y=(0, 0), classes=("fraud",)), AGREED, 2, "party")
    assert aligned.y.tolist() == [1, 1]
    aligned.check()


def test_an_unknown_class_is_refused_with_both_lists():
    with pytest.raises(DataError) as refusal:
        align_classes(graph(classes=("ok", "theft")), AGREED, 2, "party 'bank-a'")
    assert str(refusal.value) == (
        "party 'bank-a' has a class 'theft' that the agreement does not have; "
        "its classes: ok, theft; agreed classes: ok, fraud"
    )


def test_names_that_the_agreement_does_not_have_are_refused():
    with pytest.raises(DataError, match=r"its classes have names .fraud, ok., but the agreement"):
        align_classes(graph(classes=("fraud", "ok")), (), 2, "party")


@pytest.mark.parametrize("classes", [(), ("0", "1")])
def test_numbers_are_taken_in_the_agreed_order_with_a_warning(classes):
    with pytest.warns(UserWarning, match="0 is ok, 1 is fraud"):
        aligned = align_classes(graph(classes=classes), AGREED, 2, "party")
    assert aligned.y.tolist() == [0, 1, -1, 0]
    assert aligned.class_names == AGREED


def test_numbers_that_are_agreed_names_are_names():
    aligned = align_classes(graph(classes=("0", "1")), ("1", "0"), 2, "party")
    assert aligned.y.tolist() == [1, 0, -1, 1]


def test_numbers_with_gaps_keep_their_numbers():
    aligned = align_classes(graph(y=(0, 1, -1), classes=("0", "2")), (), 3, "party")
    assert aligned.y.tolist() == [0, 2, -1]
    assert (aligned.num_classes, aligned.class_names) == (3, ())


def test_a_number_above_the_agreed_classes_is_refused():
    with pytest.raises(DataError, match="has a class 2, the agreement says num_classes = 2"):
        align_classes(graph(y=(0, 2)), AGREED, 2, "party")


# ---- features ----
def test_columns_in_another_order_are_sorted_by_name():
    own = graph(features=("age", "balance"), ids=np.array(["a", "b", "c", "d"]))
    aligned = align_features(own, ("balance", "age"), "party")
    assert torch.equal(aligned.x, own.x.flip(1))
    assert aligned.feature_names == ("balance", "age")
    assert aligned.ids is own.ids


def test_missing_and_further_columns_are_refused_by_name():
    with pytest.raises(DataError, match=r"it lacks balance; it has, besides .*, income"):
        align_features(graph(features=("age", "income")), ("age", "balance"), "party")


def test_columns_without_names_are_taken_in_order_with_a_warning():
    with pytest.warns(UserWarning, match="its features have no names"):
        assert align_features(graph(), ("a", "b"), "party").feature_names == ("a", "b")
    with pytest.raises(DataError, match="2 features without names, the agreement has 3: a, b, c"):
        align_features(graph(), ("a", "b", "c"), "party")


# ---- the agreement ----
@pytest.fixture
def agreement(tmp_path):
    for name in ("coordinator", "bank-a"):
        make_party(tmp_path, name)

    def read(data):
        text = f"""
[federation]
address = "127.0.0.1:8443"
coordinator = "coordinator.pub"
[parties]
bank-a = "bank-a.pub"
[data]
{data}
"""
        (tmp_path / "federation.toml").write_text(text)
        return read_agreement(tmp_path / "federation.toml")

    return read


def test_names_stand_for_their_number_and_are_agreed(agreement):
    read = agreement('class_names = ["ok", "fraud"]\nfeature_names = ["age", "balance", "sum"]')
    assert (read.data.num_classes, read.data.num_features) == (2, 3)
    agreed = read.agreed()["data"]
    assert agreed["class_names"] == ["ok", "fraud"]
    assert agreed["feature_names"] == ["age", "balance", "sum"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("num_features = 3", "data.num_classes is missing: give it, or class_names"),
        ("num_classes = 3", "data.num_features is missing: give it, or feature_names"),
        (
            'num_features = 3\nnum_classes = 3\nclass_names = ["a", "b"]',
            "data.num_classes is 3, but data.class_names has 2 names",
        ),
        ('num_features = 3\nclass_names = ["a", "a"]', "must be a list of different names"),
        ('num_features = 3\nclass_names = "ok"', "must be a list of different names"),
        ("num_features = 3\nclass_names = [1, 2]", "must be a list of different names"),
    ],
)
def test_wrong_names_in_an_agreement_are_refused(agreement, data, words):
    with pytest.raises(ConfigError, match=words):
        agreement(data)


# ---- two banks that number their classes differently ----
def write_folder(folder, classes):
    folder.mkdir()
    names = ", ".join(f'"{name}"' for name in classes)
    (folder / "graph.toml").write_text(f"class_names = [{names}]\n")
    (folder / "nodes.csv").write_text("id,label,sum\na,fraud,9\nb,ok,1\nc,ok,2\nd,fraud,8\n")
    (folder / "edges.csv").write_text("source,target\na,d\nb,c\n")
    return folder


def test_a_class_means_the_same_at_every_party(agreement, tmp_path):
    read = agreement('class_names = ["ok", "fraud"]\nnum_features = 1\nsplit = "own"')
    orders = {"one": ("ok", "fraud"), "other": ("fraud", "ok")}
    graphs = [
        read.graph(write_folder(tmp_path / name, order), "bank-a") for name, order in orders.items()
    ]
    assert [graph.y.tolist() for graph in graphs] == [[1, 0, 0, 1]] * 2


def test_without_agreed_names_a_party_whose_classes_have_names_is_refused(agreement, tmp_path):
    """Before names were agreed, fraud at one bank was ok at the other, and nobody noticed."""
    read = agreement('num_classes = 2\nnum_features = 1\nsplit = "own"')
    with pytest.raises(DataError, match="may number them differently; add class_names"):
        read.graph(write_folder(tmp_path / "other", ("fraud", "ok")), "bank-a")
