"""Encoding: the declared pipeline, its federated fit, and its serialised forms."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedloom.data.columns import Table
from fedloom.data.encoding import Encoding, from_limbs, to_limbs
from fedloom.errors import ConfigError, DataError


def table(**columns: object) -> Table:
    arrays = {
        name: np.array(values, dtype=object if isinstance(values[0], str) else np.float64)
        for name, values in columns.items()
    }
    return Table(arrays, len(next(iter(arrays.values()))), "nodes.csv")


def fit_together(encoding: Encoding, tables: list[Table]) -> Encoding:
    while encoding.stage:
        summands = [encoding.summands(t) for t in tables]
        assert [(n, tuple(s.shape)) for n, s in sorted(summands[0].items())] == [
            (name, shape) for name, _, shape in encoding.schema
        ]
        encoding = encoding.fitted({n: sum(s[n] for s in summands) for n in summands[0]})
    return encoding


# ---- numbers as limbs ----
@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=5), st.sampled_from([0, 8, 32]))
def test_sums_of_limbs_are_sums_of_numbers(values, noise):
    total = sum(to_limbs([value], noise, ["x"]) for value in values)
    (found,) = from_limbs(total)
    assert found == pytest.approx(
        sum(values), rel=1e-12, abs=2.0**-90 + 1e-15 * max(map(abs, values))
    )


def test_noise_changes_the_limbs_and_not_the_number():
    one, other = (to_limbs([1234.5], 32, ["x"]) for _ in range(2))
    assert not torch.equal(one, other)
    assert from_limbs(one) == from_limbs(other) == [1234.5]
    with pytest.raises(DataError, match=r"column 'x': a sum of its values is 1e\+60.*another unit"):
        to_limbs([1e60], 0, ["x"])


# ---- the pipeline ----
def test_numbers_are_filled_and_scaled_as_scikit_learn_does():
    pooled = np.array([1e6, np.nan, 3.0, 5e-3, np.nan, 7.0, -2.0])
    parts = [table(v=pooled[:2].tolist()), table(v=pooled[2:].tolist())]
    for fill, imputer in {
        "mean": SimpleImputer(),
        "zero": SimpleImputer(strategy="constant", fill_value=0.0),
        2.5: SimpleImputer(strategy="constant", fill_value=2.5),
    }.items():
        encoding = fit_together(Encoding.of({"v": {"fill": fill, "kind": "number"}}), parts)
        expected = make_pipeline(imputer, StandardScaler()).fit_transform(pooled[:, None])
        found = np.concatenate([encoding.apply(part)[0] for part in parts])
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert encoding.feature_names == ("v",)


def test_log_scale_indicator_and_constants():
    rules = {"v": {"scale": "log", "indicator": True}, "c": "number", "raw": {"scale": "none"}}
    encoding = Encoding.of(rules)
    data = table(v=[0.0, -9.0, np.nan, 99.0], c=[7.0] * 4, raw=[1.0, 2.0, 3.0, 4.0])
    x, names = encoding.fit(data).apply(data)
    assert names == ("v", "v=missing", "c", "raw")
    logs = np.array([0, -np.log(10), np.nan, np.log(100)])
    expected = make_pipeline(SimpleImputer(), StandardScaler()).fit_transform(logs[:, None])
    np.testing.assert_allclose(x[:, 0], expected[:, 0], atol=1e-6)
    assert x[:, 1].tolist() == [0, 0, 1, 0]
    assert x[:, 2].tolist() == [0] * 4  # a constant is centred, not divided by 0
    assert x[:, 3].tolist() == [1, 2, 3, 4]


def test_declared_categories_are_those_of_scikit_learn():
    values = ["DE", "FR", "DE", "", "XX"]
    encoding = Encoding.of({"country": {"categories": ["FR", "DE"]}})
    x, names = encoding.fit(table(country=values)).apply(table(country=values))
    assert names == ("country=FR", "country=DE", "country=other")
    known = OneHotEncoder(categories=[["FR", "DE"]], handle_unknown="ignore", sparse_output=False)
    expected = known.fit_transform(np.array(values, object)[:, None])
    assert x[:, :2].tolist() == expected.tolist()
    assert x[:, 2].tolist() == [0, 0, 0, 0, 1]


def test_hashed_categories_do_not_show_their_values():
    parts = [table(c=["DE", "FR"]), table(c=["DE", "NA"])]  # NA is a country here
    encoding = fit_together(Encoding.of({"c": "category"}), parts)
    assert len(encoding.feature_names) == 4
    assert encoding.feature_names[-1] == "c=other"
    assert all(name.startswith("c=#") for name in encoding.feature_names[:-1])
    assert not any(value in encoding.to_json() for value in ("DE", "FR", '"NA"'))
    x, _ = encoding.apply(table(c=["DE", "FR", "NA", "unseen", ""]))
    assert x.sum(1).tolist() == [1, 1, 1, 1, 0]
    assert x[3, -1] == 1
    assert len({row.tobytes() for row in x[:3]}) == 3


def test_rare_categories_count_as_other_and_buckets_may_collide():
    data = table(c=["DE", "DE", "FR"])
    rare = Encoding.of({"c": "category"}, {"min_count": 2}).fit(data)
    assert len(rare.feature_names) == 2
    assert rare.apply(data)[0][:, 1].tolist() == [0, 0, 1]
    few = Encoding.of({"c": "category"}, {"bits": 1}).fit(table(c=[str(k) for k in range(50)]))
    assert few.feature_names == ("c=#0", "c=#1", "c=other")


def test_dates_booleans_and_formats():
    data = table(
        day=["2000-01-02", "", "1999-12-31T12:00:00", "2000-01-01T02:00:00+02:00"],
        german=["31.12.1999", "01.01.2000", "02.01.2000", "-"],
        flag=["Yes", "no", "TRUE", "n/a"],
    )
    rules = {
        "day": {"kind": "date", "scale": "none", "fill": 9},
        "german": {"kind": "date", "format": "%d.%m.%Y", "scale": "none", "fill": "zero"},
        "flag": "boolean",
    }
    x, names = Encoding.of(rules).fit(data).apply(data)
    assert names == ("day", "german", "flag")
    assert x[:, 0].tolist() == [1, 9, -0.5, 0]
    assert x[:, 1].tolist() == [-1, 0, 1, 0]
    assert x[:, 2].tolist() == pytest.approx([1, 0, 1, 2 / 3])


# ---- kinds ----
@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        ([[1.0, 2.5], [0.0, 1.0]], "number"),
        ([[1.0, 0.0], [0.0, np.nan]], "boolean"),
        ([["yes", "no"], [0.0, 1.0]], "boolean"),
        ([["2024-01-01", ""], ["2023-05-05", "2022-01-01"]], "date"),
        ([["DE", "FR"], ["2024-01-01", "x"]], "category"),
        ([["DE", ""], ["", ""]], "category"),
        ([["", ""], [np.nan, np.nan]], "ignore"),
        ([[f"person {k}" for k in range(200)], ["a", "b"]], "ignore"),
    ],
)
def test_kinds_that_all_parties_agree_on(columns, kinds, caplog):
    tables = [table(c=values) for values in columns]
    encoding = Encoding.of({"c": "auto"})
    summands = [encoding.summands(t) for t in tables]
    total = {name: sum(s[name] for s in summands) for name in summands[0]}
    assert encoding.fitted(total).kinds == (kinds,)
    assert ("'c' is ignored" in caplog.text) == (kinds == "ignore")


def test_parties_with_different_kinds_are_refused():
    tables = [table(c=[1.0, 2.0]), table(c=["DE", "FR"])]
    with pytest.raises(DataError, match=r"column 'c': its values are of different kinds; declare"):
        fit_together(Encoding.of({"c": "auto"}), tables)


def test_a_mistake_in_a_column_of_numbers_is_not_a_category():
    data = table(c=["1", "2", "3", "much"])
    with pytest.raises(DataError, match=r"nodes.csv, line 4, column 'c': 'much' is not a finite"):
        Encoding.of({"c": "auto"}).fit(data)
    assert len(Encoding.of({"c": "category"}).fit(data).feature_names) == 5


@pytest.mark.parametrize(
    ("rule", "values", "message"),
    [
        ("number", ["1", "x"], "line 2, column 'c': 'x' is not a finite number"),
        ("boolean", ["yes", "maybe"], "line 2, column 'c': 'maybe' is none of true, false"),
        ("date", ["2024-01-01", "May"], "line 2, column 'c': 'May' is not a date"),
        ({"kind": "number", "fill": "none"}, [1.0, np.nan], "line 2, column 'c': the value is mis"),
    ],
)
def test_values_of_another_kind_are_named(rule, values, message):
    with pytest.raises(DataError, match=message):
        Encoding.of({"c": rule}).fit(table(c=values))


@pytest.mark.parametrize(
    ("rules", "settings", "message"),
    [
        ({"c": "numbr"}, {}, "unknown columns.c.kind: 'numbr'. Did you mean 'number'"),
        ({"c": {"scal": "log"}}, {}, "unknown key of columns.c: 'scal'. Did you mean 'scale'"),
        ({"c": {"scale": "minmax"}}, {}, "unknown columns.c.scale: 'minmax'"),
        ({"c": {"fill": "median"}}, {}, "columns.c.fill is 'median', must be a number or one of"),
        ({"c": {"fill": float("nan")}}, {}, "columns.c.fill is nan"),
        ({"c": 3}, {}, "columns.c is 3, must be a kind"),
        ({"c": {"indicator": 1}}, {}, "columns.c.indicator is 1, must be true or false"),
        ({"c": {"categories": "DE"}}, {}, "columns.c.categories is 'DE', must be a list of texts"),
        ({"c": {"categories": ["a", "a"]}}, {}, "columns.c.categories has the same text twice"),
        (
            {"c": {"kind": "number", "categories": ["a"]}},
            {},
            "columns.c.categories: the kind is 'number'",
        ),
        ({}, {"bits": 40}, "encoding.bits is 40, must be a whole number from 1 to 20"),
        ({}, {"min_count": 0}, "encoding.min_count is 0, must be"),
        ({}, {"bit": 3}, "unknown key of encoding: 'bit'. Did you mean 'bits'"),
        ({}, {"scale": "big"}, "scale: 'big'"),
    ],
)
def test_declarations_are_checked(rules, settings, message):
    with pytest.raises(ConfigError, match=message):
        Encoding.of(rules, settings)


# ---- forms that are kept and sent ----
def test_json_and_tensors_give_the_same_encoding_back():
    rules = {"a": "auto", "c": "auto", "d": {"categories": ["x"]}, "e": "ignore"}
    data = table(a=[1.0, np.nan, 4.0], c=["u", "v", ""], d=["x", "y", "x"])
    encoding = Encoding.of(rules, {"bits": 5})
    while True:
        assert Encoding.from_json(encoding.to_json()) == encoding
        assert Encoding.of(rules, {"bits": 5}).with_tensors(encoding.tensors()) == encoding
        if not encoding.stage:
            break
        encoding = encoding.fitted(encoding.summands(data))
    with pytest.raises(DataError, match=r"nodes.csv: no column 'a'. Columns there: c, d"):
        encoding.apply(table(c=["u"], d=["x"]))


def test_an_encoding_that_is_not_fitted_or_damaged_is_refused():
    encoding = Encoding.of({"a": "number"})
    with pytest.raises(DataError, match="not fitted: the stage 'totals' is missing"):
        encoding.apply(table(a=[1.0]))
    for change in (
        {"format": "other/9"}, {"extra": 1}, {"mean": [1.0, 2.0]}, {"mean": [None]},
        {"kinds": ["auto"]}, {"columns": 3}, {"bits": 99},
    ):  # fmt: skip
        content = json.loads(encoding.fit(table(a=[1.0, 2.0])).to_json()) | change
        with pytest.raises(DataError, match="encoding: it is not what fedloom wrote"):
            Encoding.from_json(json.dumps(content))
    with pytest.raises(DataError, match="encoding: it is not what fedloom wrote"):
        Encoding.from_json("{")


def test_rows_to_fit_on():
    data = table(a=[1.0, 3.0, 1000.0])
    encoding = Encoding.of({"a": "number"})
    while encoding.stage:
        encoding = encoding.fitted(encoding.summands(data, np.array([True, True, False])))
    assert (encoding.mean, encoding.deviation) == ((2.0,), (1.0,))
