"""The section of a report about privacy: what `fedloom audit` found, from audit.json."""

from __future__ import annotations

from fedloom.errors import DataError
from fedloom.experiments.audit_file import Audit, number, read_audit
from fedloom.experiments.report.comparison import Comparison
from fedloom.experiments.report.spec import Figure, columns, make_figure
from fedloom.experiments.report.spec import number as number_cell
from fedloom.experiments.run_folder import LeftOut

_HEAD = ("attack", "by", "how", "score", "from", "to", "chance", "verdict", "sees", "remark")
_HELP = {
    "score": "area under the ROC curve, or a rate",
    "from": "lower end of the 95 % interval",
    "to": "upper end of the 95 % interval",
    "chance": "the score without the messages",
    "verdict": "bites: an AUC of 0.8 and more, or as much above chance; held: up to 0.6",
}
_CAPTION = (
    "Each attack got what its attacker sees, and what it is said to know. The attacks are simple: "
    "a better one may read more."
)


def audit_figures(c: Comparison) -> list[Figure]:
    """Returns a table for each audited run. Adds folders with a damaged audit to `c.left_out`."""
    found = []
    for (task, row), entry in c.entries.items():
        for run in entry.runs:
            try:
                audit = read_audit(run.folder)
            except DataError as error:
                c.left_out.append(LeftOut(str(run.folder), str(error)))
                continue
            if audit is not None:
                found.append(_table(c, task, row, audit))
    return found


def _table(c: Comparison, task: str, row: str, audit: Audit) -> Figure:
    rows = []
    for each in audit.findings:
        numbers = [
            number_cell(value, number(value))
            for value in (each.score, each.low, each.high, each.chance)
        ]
        verdict = each.verdict if each.applies else "does not apply"
        words = [verdict, each.sees, each.why]
        rows.append([each.attack, each.attacker, each.how, *numbers, *words])
    kind = "secure" if audit.about.get("secure") else "plain"
    seed = audit.about.get("seed")
    return make_figure(
        c,
        "privacy",
        "table",
        f"audit {row} {seed}",
        task,
        f"What attacks read: {row}, {kind} run, seed {seed}",
        _CAPTION,
        columns=columns(_HEAD, ("attack", "by", "how", "verdict", "sees", "remark"), _HELP),
        rows=rows,
    )
