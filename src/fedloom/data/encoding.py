"""Encoding: the raw columns of a table become features, the same way for every party.

A rule per column says what it holds (`kind`), what stands for a missing value (`fill`) and how
numbers are scaled (`scale`). An encoding is fitted to the tables of all parties by sums alone:

    stage     each party adds                                     the sum gives
    kinds     which kinds each undeclared column can have         its kind
    totals    counts and sums of numbers; counts of hashed        fill values, means;
              categories                                          the categories that exist
    squares   sums of squared distances from the mean             standard deviations

    encoding = Encoding.of({"amount": {"scale": "log"}, "country": "category"})
    while encoding.stage:
        total = the sum over all parties of encoding.summands(table)
        encoding = encoding.fitted(total)
    x, names = encoding.apply(table)

The result is that of scikit-learn's SimpleImputer, StandardScaler and OneHotEncoder on the pooled
tables. No party shows its values. A category travels as a count in one of 2^bits buckets, which
SHA-256 chooses by the column and the value. Two values may share a bucket, and then share a
feature. `categories` in a rule gives the values by name instead; then nothing is hashed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.data.columns import KINDS, MOST_CATEGORIES, Floats, Table
from fedloom.errors import ConfigError, DataError, unknown

LOG = logging.getLogger("fedloom.data")
FORMAT = "fedloom-encoding/1"
AUTO, IGNORE = "auto", "ignore"
RULE_KINDS = (AUTO, *KINDS, IGNORE)
FILLS = ("mean", "zero", "none")
SCALES = ("standard", "log", "none")
STAGES = ("kinds", "totals", "squares")
VOTES = (*KINDS, "empty", "identifier")  # what a party says about an undeclared column
# A sum travels as LIMBS whole numbers: Σ limb_i · 2^(16 i − 96). So it needs no agreement on a
# scale, and no precision is lost, whatever the range of the numbers.
LIMB_BITS, FRACTION_BITS, LIMBS = 16, 96, 14
LARGEST = 2.0 ** (LIMB_BITS * LIMBS - FRACTION_BITS - 2)
OTHER, MISSING = "other", "missing"
EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Column:
    """The declared rule of one column.

    Attributes:
        name: The column's name in the table.
        kind: "number", "boolean", "date", "category" or "ignore". "auto": what the values are.
        fill: What stands for a missing number: "mean", "zero", a number, or "none" (a missing
            value is an error). A missing category has no feature that is 1.
        scale: "standard" (mean 0, variance 1), "log" (sign(v) · log(1 + |v|), then standard) or
            "none". "": "standard" for numbers and dates, "none" for booleans.
        indicator: Whether there is one more feature, which is 1 where the value is missing.
        categories: The categories by name. Empty: hashed.
        format: How dates are written, as in `datetime.strptime`. "": ISO 8601.
    """

    name: str
    kind: str = AUTO
    fill: str | float = "mean"
    scale: str = ""
    indicator: bool = False
    categories: tuple[str, ...] = ()
    format: str = ""

    @classmethod
    def of(cls, name: str, given: Any, defaults: Mapping[str, Any], where: str) -> Column:
        """Returns the rule of a column, checked.

        Args:
            name: The column.
            given: A kind, or a table of this class's fields.
            defaults: Values of fields that are not given.
            where: What an error message begins with.
        """
        given = {"kind": given} if isinstance(given, str) else given
        place = f"{where}{name}"
        if not isinstance(given, Mapping):
            raise ConfigError(
                f'{place} is {given!r}, must be a kind such as "number" or a table such as '
                '{kind = "number", fill = "zero"}'
            )
        valid = [f.name for f in fields(cls) if f.name != "name"]
        for key in given:
            if key not in valid:
                raise unknown(f"key of {place}:", key, valid)
        implied = {"kind": "category"} if "categories" in given else {}
        rule = cls(name, **{**defaults, **implied, **given})
        for key, choices in (("kind", RULE_KINDS), ("scale", ("", *SCALES))):
            if getattr(rule, key) not in choices:
                raise unknown(f"{place}.{key}:", str(getattr(rule, key)), filter(None, choices))
        fill: Any = rule.fill
        number = isinstance(fill, int | float) and not isinstance(fill, bool)
        if not (number and math.isfinite(fill)) and fill not in FILLS:
            raise ConfigError(
                f"{place}.fill is {rule.fill!r}, must be a number or one of {', '.join(FILLS)} "
                "(a median is not a sum, so parties cannot compute one together)"
            )
        if not isinstance(rule.indicator, bool):
            raise ConfigError(f"{place}.indicator is {rule.indicator!r}, must be true or false")
        names = rule.categories
        if isinstance(names, str) or not all(isinstance(text, str) for text in names):
            raise ConfigError(f"{place}.categories is {names!r}, must be a list of texts")
        if len({*names, ""}) <= len(names):
            raise ConfigError(f"{place}.categories has the same text twice, or an empty one")
        if names and rule.kind != "category":
            raise ConfigError(f'{place}.categories: the kind is {rule.kind!r}, not "category"')
        return replace(rule, categories=tuple(names))


@dataclass(frozen=True)
class Encoding:
    """The rules of all columns and, as far as it is fitted, what the parties' sums gave.

    Attributes:
        columns: The rules, in the order of the features.
        bits: Hashed categories have 2^bits buckets.
        min_count: A category that occurs less often over all parties counts as "other". 0: it is
            not declared; then every category of a single table counts.
        kinds: The kind of each column.
        fill: What stands for a missing value in each column, after the logarithm.
        mean: The mean of each column, missing values filled.
        deviation: The standard deviation of each column; 1 for a constant.
        buckets: The buckets of each column that occur.
    """

    columns: tuple[Column, ...]
    bits: int = 12
    min_count: int = 0
    kinds: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds and all(column.kind != AUTO for column in self.columns):
            object.__setattr__(self, "kinds", tuple(column.kind for column in self.columns))

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> Encoding:
        """Returns an encoding that is declared but not fitted.

        Args:
            columns: The rule of each column, in the order of the features: a kind ("auto" to
                detect it), or a table of the fields of `Column`.
            settings: `bits` and `min_count`, and `fill`, `scale` and `indicator` for columns that
                do not give them.
            where: What an error message begins with, such as the file.
        """
        settings = dict(settings or {})
        own: dict[str, Any] = {}
        for key in ("bits", "min_count"):
            if key in settings:
                own[key] = settings.pop(key)
        for key in settings:
            if key not in (valid := ("bits", "fill", "indicator", "min_count", "scale")):
                raise unknown(f"key of {where}encoding:", key, valid)
        for key, (low, high) in {"bits": (1, 20), "min_count": (1, 10**9)}.items():
            value = own.get(key, low)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(
                    f"{where}encoding.{key} is {value!r}, must be a whole number from {low} to "
                    f"{high}"
                )
        Column.of("*", {}, settings, f"{where}encoding, default of columns.")
        rules = (Column.of(n, rule, settings, f"{where}columns.") for n, rule in columns.items())
        return cls(tuple(rules), **own)

    # ---- fitting ----
    @property
    def stage(self) -> str:
        """What the next sum is about: "kinds", "totals" or "squares". "": it is fitted."""
        if not self.kinds and self.columns:
            return "kinds"
        if len(self.mean) < len(self.columns):
            return "totals"
        return "squares" if len(self.deviation) < len(self.columns) else ""

    @property
    def schema(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """The names, dtypes and shapes of the summands of the next stage, sorted by name."""
        count, hashed = len(self.columns), len(self._hashed)
        rows: dict[str, tuple[int, ...]] = {
            "kinds": {"parties": (), "votes": (count, len(VOTES))},
            "totals": {"present": (count,), "rows": (), "sums": (count, LIMBS)}
            | ({"categories": (hashed, 2**self.bits)} if hashed else {}),
            "squares": {"rows": (), "squares": (count, LIMBS)},
        }[self.stage]
        return tuple((name, "int64", shape) for name, shape in sorted(rows.items()))

    def summands(
        self, table: Table, rows: npt.NDArray[Any] | None = None, noise_bits: int = 0
    ) -> dict[str, Tensor]:
        """Returns what a party adds to the sum of the next stage: tensors of whole numbers.

        Args:
            table: The party's table.
            rows: The rows to fit on, a mask or numbers. None: all.
            noise_bits: Random carries of so many bits between the parts of a number. They cancel
                in the number, so that the parts of a secure sum reveal nothing but the sum.
        """
        self._require_columns(table)
        table = table if rows is None else table.take(rows)
        if self.stage == "kinds":
            votes = np.zeros((len(self.columns), len(VOTES)), np.int64)
            for k, column in enumerate(self.columns):
                if column.kind == AUTO:
                    possible = table.possible_kinds(column.name)
                    votes[k] = [possible[kind] for kind in VOTES]
            return {"parties": torch.tensor(1), "votes": torch.from_numpy(votes)}
        sums, present = np.zeros(len(self.columns)), np.zeros(len(self.columns), np.int64)
        for k in self._numeric:
            values = self._values(table, k)
            known = ~np.isnan(values)
            present[k] = known.sum()
            if self.stage == "totals":
                sums[k] = math.fsum(values[known])
            else:
                sums[k] = math.fsum((np.where(known, values, self.fill[k]) - self.mean[k]) ** 2)
        limbs = to_limbs(sums, noise_bits, [column.name for column in self.columns])
        if self.stage == "squares":
            return {"rows": torch.tensor(table.rows), "squares": limbs}
        summands = {
            "present": torch.from_numpy(present),
            "rows": torch.tensor(table.rows),
            "sums": limbs,
        }
        if self._hashed:
            counts = np.zeros((len(self._hashed), 2**self.bits), np.int64)
            for row, k in enumerate(self._hashed):
                name = self.columns[k].name
                texts, often = np.unique(table.texts(name).astype(str), return_counts=True)
                for text, number in zip(texts.tolist(), often.tolist(), strict=True):
                    if text:
                        counts[row, self._bucket(name, text)] += number
            summands["categories"] = torch.from_numpy(counts)
        return summands

    def fitted(self, total: Mapping[str, Tensor]) -> Encoding:
        """Returns the encoding with the result of one more stage.

        total: the sum of all parties' summands.
        """
        if self.stage == "kinds":
            return self._with_kinds(total["votes"].numpy(), int(total["parties"]))
        if self.stage == "totals":
            return self._with_totals(total)
        rows, squares = int(total["rows"]), from_limbs(total["squares"])
        deviations = [1.0] * len(self.columns)
        for k in self._scaled:
            variance = squares[k] / max(rows, 1)
            # As scikit-learn does: a variance that rounding alone explains is that of a constant.
            bound = rows * EPSILON * variance + (rows * self.mean[k] * EPSILON) ** 2
            deviations[k] = math.sqrt(variance) if variance > bound else 1.0
        return replace(self, deviation=tuple(deviations))

    def fit(self, table: Table) -> Encoding:
        """Returns the encoding fitted to a single table."""
        encoding = self
        while encoding.stage:
            encoding = encoding.fitted(encoding.summands(table))
        return encoding

    def _with_kinds(self, votes: npt.NDArray[np.int64], parties: int) -> Encoding:
        kinds = []
        for column, row in zip(self.columns, votes.tolist(), strict=True):
            vote = dict(zip(VOTES, row, strict=True))
            common = [kind for kind in KINDS if vote[kind] == parties]
            if column.kind != AUTO:
                kinds.append(column.kind)
            elif vote["empty"] == parties:
                LOG.warning("column %r is ignored: it has no values", column.name)
                kinds.append(IGNORE)
            elif common:
                kinds.append(common[0])
            elif vote["identifier"] and vote["number"] == vote["empty"]:
                LOG.warning(
                    "column %r is ignored: it has more than %d different texts; to use it, declare "
                    "it as a category in [columns]",
                    column.name, MOST_CATEGORIES,
                )  # fmt: skip
                kinds.append(IGNORE)
            else:
                raise DataError(
                    f"column {column.name!r}: its values are of different kinds; declare one in "
                    f"[columns]. Valid: {', '.join((*KINDS, IGNORE))}"
                )
        return replace(self, kinds=tuple(kinds))

    def _with_totals(self, total: Mapping[str, Tensor]) -> Encoding:
        rows, sums = int(total["rows"]), from_limbs(total["sums"])
        fill, mean = [0.0] * len(self.columns), [0.0] * len(self.columns)
        for k in self._numeric:
            rule, present = self.columns[k], int(total["present"][k])
            if rule.fill == "mean":
                fill[k] = sums[k] / max(present, 1)
            elif not isinstance(rule.fill, str):
                given = np.array([float(rule.fill)])
                fill[k] = float(_logarithm(given)[0] if self._scale(k) == "log" else given[0])
            mean[k] = (sums[k] + (rows - present) * fill[k]) / max(rows, 1)
        buckets: list[tuple[int, ...]] = [()] * len(self.columns)
        for row, k in enumerate(self._hashed):
            occupied = (total["categories"][row] >= max(self.min_count, 1)).nonzero()
            buckets[k] = tuple(occupied.flatten().tolist())
        deviation = () if self._scaled else (1.0,) * len(self.columns)
        return replace(
            self, fill=tuple(fill), mean=tuple(mean), buckets=tuple(buckets), deviation=deviation
        )

    # ---- encoding ----
    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the features. An encoding that is not fitted has none."""
        self._require_fitted()
        return tuple(name for k in range(len(self.columns)) for name in self._features(k))

    def described(self, most: int = 8) -> str:
        """Returns the columns with their kinds, in words. most: how many of them to name."""
        named = zip(self.columns, self.kinds, strict=True)
        shown = [f"{column.name} ({kind})" for column, kind in named if kind != IGNORE]
        rest = f" and {len(shown) - most} more" if len(shown) > most else ""
        return ", ".join(shown[:most]) + rest

    def apply(self, table: Table) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
        """Returns the features [rows, features] of a table, and their names.

        The table needs the columns of the encoding; other columns are left out.
        """
        self._require_fitted()
        self._require_columns(table)
        parts: list[npt.NDArray[np.float32]] = [np.zeros((table.rows, 0), np.float32)]
        for k, (rule, kind) in enumerate(zip(self.columns, self.kinds, strict=True)):
            if kind == IGNORE:
                continue
            if kind == "category":
                texts = table.texts(rule.name)
                parts.append(self._one_hot(k, texts))
                missing = texts == ""
            else:
                values = self._values(table, k)
                parts.append(self._scaled_numbers(k, values))
                missing = np.isnan(values)
            if rule.indicator:
                parts.append(missing.astype(np.float32)[:, None])
        x = np.concatenate(parts, axis=1)
        return x, self.feature_names

    def _scaled_numbers(self, k: int, values: Floats) -> npt.NDArray[np.float32]:
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import StandardScaler

        # A column of one value, the fill, has that value as its mean.
        imputer = SimpleImputer(strategy="mean").fit([[self.fill[k]]])
        scaler = StandardScaler()
        scaler.mean_, scaler.scale_ = np.array([self.mean[k]]), np.array([self.deviation[k]])
        scaler.var_, scaler.n_features_in_ = scaler.scale_**2, 1
        filled = imputer.transform(values[:, None])
        scaled: npt.NDArray[Any] = scaler.transform(filled) if k in self._scaled else filled
        return scaled.astype(np.float32)

    def _one_hot(self, k: int, texts: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        from sklearn.preprocessing import OneHotEncoder

        names = self._categories(k)
        code = {text: self._category(k, text, set(names)) for text in set(texts.tolist())}
        codes = np.array([code[text] for text in texts.tolist()], dtype=object)[:, None]
        encoder = OneHotEncoder(
            categories=[np.array(names, dtype=object)],
            sparse_output=False,
            dtype=np.float32,
            handle_unknown="ignore",
        ).fit(np.array(names, dtype=object)[:, None])
        encoded: npt.NDArray[np.float32] = encoder.transform(codes)
        return encoded

    def _category(self, k: int, text: str, names: set[str]) -> str:
        """Returns the name of the category that a text counts as; "" if it is missing."""
        if not text:
            return ""
        rule = self.columns[k]
        name = text if rule.categories else self._bucket_name(self._bucket(rule.name, text))
        return name if name in names else OTHER

    def _categories(self, k: int) -> tuple[str, ...]:
        named = self.columns[k].categories or tuple(map(self._bucket_name, self.buckets[k]))
        return named if OTHER in named else (*named, OTHER)

    def _features(self, k: int) -> list[str]:
        name, kind = self.columns[k].name, self.kinds[k]
        if kind == IGNORE:
            return []
        found = [name]
        if kind == "category":
            found = [f"{name}={category}" for category in self._categories(k)]
        return [*found, f"{name}={MISSING}"] if self.columns[k].indicator else found

    def _bucket(self, name: str, text: str) -> int:
        digest = hashlib.sha256(f"{name}\0{text}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> (32 - self.bits)

    def _bucket_name(self, bucket: int) -> str:
        return f"#{bucket:0{-(-self.bits // 4)}x}"

    # ---- columns by kind ----
    @cached_property
    def _numeric(self) -> tuple[int, ...]:
        kinds = enumerate(self.kinds)
        return tuple(k for k, kind in kinds if kind in ("number", "boolean", "date"))

    @cached_property
    def _scaled(self) -> tuple[int, ...]:
        return tuple(k for k in self._numeric if self._scale(k) != "none")

    @cached_property
    def _hashed(self) -> tuple[int, ...]:
        kinds = enumerate(self.kinds)
        return tuple(k for k, kd in kinds if kd == "category" and not self.columns[k].categories)

    def _scale(self, k: int) -> str:
        return self.columns[k].scale or ("none" if self.kinds[k] == "boolean" else "standard")

    def _values(self, table: Table, k: int) -> Floats:
        """Returns a column as numbers, after the logarithm, NaN where a value is missing."""
        rule = self.columns[k]
        values = table.values(rule.name, self.kinds[k], rule.format)
        missing = np.isnan(values)
        if rule.fill == "none" and missing.any():
            place = table.at(int(missing.argmax()), rule.name)
            raise DataError(f'{place}: the value is missing, and fill of this column is "none"')
        return _logarithm(values) if self._scale(k) == "log" else values

    def _require_fitted(self) -> None:
        if self.stage:
            raise DataError(f"the encoding is not fitted: the stage {self.stage!r} is missing")

    def _require_columns(self, table: Table) -> None:
        for k, column in enumerate(self.columns):
            if (self.kinds[k] if self.kinds else column.kind) != IGNORE:
                table.column(column.name)

    # ---- as tensors and as JSON ----
    def tensors(self) -> dict[str, Tensor]:
        """Returns what is fitted as tensors, which a server can send to the parties."""
        state: dict[str, Tensor] = {}
        if self.kinds:
            state["kinds"] = torch.tensor([RULE_KINDS.index(kind) for kind in self.kinds])
        for name in ("fill", "mean", "deviation"):
            if values := getattr(self, name):
                state[name] = torch.tensor(values, dtype=torch.float64)
        if self.mean and self._hashed:
            state["buckets"] = torch.zeros(len(self._hashed), 2**self.bits, dtype=torch.bool)
            for row, k in enumerate(self._hashed):
                state["buckets"][row, list(self.buckets[k])] = True
        return state

    def with_tensors(self, state: Mapping[str, Tensor]) -> Encoding:
        """Returns the encoding with what another one with the same rules gave as `tensors`."""
        if "kinds" not in state:
            return self
        encoding = replace(self, kinds=tuple(RULE_KINDS[k] for k in state["kinds"].tolist()))
        numbers = ("fill", "mean", "deviation")
        found: dict[str, Any] = {k: tuple(state[k].tolist()) for k in numbers if k in state}
        buckets: list[tuple[int, ...]] = [()] * len(self.columns)
        for row, k in enumerate(encoding._hashed if "buckets" in state else ()):
            buckets[k] = tuple(state["buckets"][row].nonzero().flatten().tolist())
        return replace(encoding, **found, buckets=tuple(buckets) if "mean" in state else ())

    def to_json(self) -> str:
        """Returns the encoding, declared and fitted, as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Returns the encoding that `to_json` wrote. Raises a DataError if it is damaged."""
        try:
            content = json.loads(text)
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            columns = content.pop("columns")
            settings = {key: n for key in ("bits", "min_count") if (n := content.pop(key)) != 0}
            rules = {column.pop("name"): column for column in columns}
            declared = cls.of(rules, settings)
            found = {f.name: content.pop(f.name) for f in fields(cls) if f.name in content}
            if content or any(len(v) not in (0, len(declared.columns)) for v in found.values()):
                raise ValueError("it has other fields, or fields of another length")
            if not all(kind in RULE_KINDS[1:] for kind in found["kinds"]):
                raise ValueError(f"kinds are {found['kinds']}")
            numbers: dict[str, Any] = {
                k: tuple(map(float, found[k])) for k in ("fill", "mean", "deviation")
            }
            if not all(math.isfinite(value) for row in numbers.values() for value in row):
                raise ValueError("a number is not finite")
            buckets = tuple(tuple(map(int, row)) for row in found["buckets"])
            return replace(declared, kinds=tuple(found["kinds"]), **numbers, buckets=buckets)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"encoding: it is not what fedloom wrote ({error})") from error


def to_limbs(values: Sequence[float] | Floats, noise_bits: int, names: Sequence[str]) -> Tensor:
    """Returns numbers as [numbers, LIMBS] int64: Σ limb_i · 2^(16 i − 96), exactly.

    Args:
        values: The numbers.
        noise_bits: Random carries of so many bits move value between neighbouring limbs. The sum
            of many parties' limbs then reveals the sum of their numbers only.
        names: What error messages call the numbers.
    """
    rows = []
    for value, name in zip(values, names, strict=True):
        if not abs(value) < LARGEST:
            raise DataError(
                f"column {name!r}: a sum of its values is {value:g}, must be within "
                f'±{LARGEST:g}; use another unit, or scale = "log"'
            )
        whole = round(Fraction(float(value)) * 2**FRACTION_BITS)
        limbs = [(abs(whole) >> (LIMB_BITS * i)) % 2**LIMB_BITS for i in range(LIMBS)]
        limbs = [-limb for limb in limbs] if whole < 0 else limbs
        for i in range(LIMBS - 1) if noise_bits else ():
            carry = secrets.randbits(noise_bits) - 2 ** (noise_bits - 1)
            limbs[i] += carry << LIMB_BITS
            limbs[i + 1] -= carry
        rows.append(limbs)
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), LIMBS)


def from_limbs(limbs: Tensor) -> list[float]:
    """Returns the numbers of `to_limbs`, or of a sum of such tensors."""
    return [
        float(
            Fraction(sum(limb << (LIMB_BITS * i) for i, limb in enumerate(row)), 2**FRACTION_BITS)
        )
        for row in limbs.tolist()
    ]


def _logarithm(values: Floats) -> Floats:
    from sklearn.preprocessing import FunctionTransformer

    signed_log = FunctionTransformer(lambda v: np.sign(v) * np.log1p(np.abs(v)))
    result: Floats = signed_log.transform(values)
    return result
