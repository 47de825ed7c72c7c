"""Audit file: what the attacks of `fedloom audit` found, in a run folder or another one.

This module does not import torch: reports read the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedloom._system import make_private, write_atomic
from fedloom.errors import ConfigError, DataError
from fedloom.experiments.display import data_frame
from fedloom.experiments.escaping import csv_text

FILE, TABLE = "audit.json", "audit.csv"
FORMAT = "fedloom-audit/1"
SHADOWS = 8  # shadow models, if nobody says how many
HELD, BITES = 0.2, 0.6  # advantages: of an AUC they are 0.6 and 0.8


@dataclass(frozen=True)
class Finding:
    """What one attack found.

    Attributes:
        attack: The attack's name.
        how: How it works, in a few words.
        attacker: Who it is: server, client or outsider.
        sees: What the attacker sees of the run.
        knows: What it knows besides.
        measure: What the score is: "AUC" or "rate".
        score: The score; None if the attack does not apply.
        low: The lower end of its 95 % interval.
        high: The upper end.
        chance: The score without the messages.
        why: Why the attack does not apply, or a remark.
    """

    attack: str
    how: str
    attacker: str
    sees: str = ""
    knows: str = ""
    measure: str = "AUC"
    score: float | None = None
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    why: str = ""

    @property
    def applies(self) -> bool:
        """Whether the attack applies."""
        return self.score is not None

    @property
    def advantage(self) -> float | None:
        """What the attack gains over chance: 0 is chance, 1 is perfect. An AUC of 0.8 is 0.6."""
        if self.score is None or self.chance is None or self.chance >= 1:
            return None
        return (self.score - self.chance) / (1 - self.chance)

    @property
    def verdict(self) -> str:
        """Returns "bites" from an AUC of 0.8, "held" up to 0.6, "partly" between, "-" if none."""
        if self.advantage is None:
            return "-"
        if self.advantage >= BITES:
            return "bites"
        return "held" if self.advantage <= HELD + 1e-9 else "partly"

    def record(self) -> dict[str, Any]:
        """Returns the fields, the advantage and the verdict as a plain dict."""
        gained = self.advantage
        return {**asdict(self), "advantage": gained, "verdict": self.verdict}


@dataclass(frozen=True)
class Audit:
    """The findings of all attacks on a run.

    Attributes:
        about: The run: method, dataset, clients, seed, whether it is secure, and its accuracy.
        findings: What the attacks found, in order.
    """

    about: Mapping[str, Any]
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        applied = [f for f in self.findings if f.applies]
        bites = ", ".join(dict.fromkeys(f.attack for f in applied if f.verdict == "bites"))
        return (
            f"Audit({self.about.get('method')} on {self.about.get('dataset')}: "
            f"{len(applied)} attacks apply; {bites or 'none'} bites)"
        )

    def records(self) -> list[dict[str, Any]]:
        """Returns a dict for each finding."""
        return [finding.record() for finding in self.findings]

    def pandas(self) -> Any:
        """Returns the findings as a pandas DataFrame (extra `tables`)."""
        return data_frame(self.records())

    def save(self, folder: str | Path) -> Path:
        """Writes audit.json and audit.csv into a folder, made if needed. Returns the first."""
        place, records = Path(folder), self.records()
        content = {"format": FORMAT, "about": dict(self.about), "findings": records}
        rows = [list(records[0]), *(list(record.values()) for record in records)] if records else []
        try:
            make_private(place)
            write_atomic(place / TABLE, csv_text(rows).encode())
            text = json.dumps(content, indent=1, allow_nan=False)
            write_atomic(place / FILE, (text + "\n").encode())
        except OSError as error:
            raise ConfigError(f"out: cannot write to {str(place)!r} ({error.strerror})") from error
        return place / FILE


def read_audit(folder: Path) -> Audit | None:
    """Returns the audit in a folder; None if there is none. Raises a DataError if it is damaged."""
    try:
        content = json.loads((folder / FILE).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, must be {FORMAT!r}")
        names = [f.name for f in fields(Finding)]
        kept = [Finding(**{name: row[name] for name in names}) for row in content["findings"]]
        return Audit(dict(content["about"]), tuple(kept))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"audit: {str(folder / FILE)!r} is damaged ({error})") from error


def number(value: float | None) -> str:
    """Returns a score as text; "-" if there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"
