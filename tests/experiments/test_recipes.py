"""The recipes are what bench/recipes.py writes, and bench/reproduce.py says honestly what became of them."""

import json
import math
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.experiments.recipe import make_recipe

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import recipes  # noqa: E402  # modules of bench/, which is no package
import reproduce  # noqa: E402

NUMBERS = recipes.numbers()
ON_DISK = sorted((ROOT / "recipes").rglob("*.toml"))


def number(path="fedgkc/x-louvain10.toml", paper=80.0, **more):
    tables = {
        "data": {"dataset": "x"},
        "partition": {"name": "louvain", "clients": 10},
        "method": {"name": "fedavg"},
    }
    local = {**tables, "method": {"name": "local"}}
    return recipes.Number(
        path, "A paper, Table 1", paper, "", tables, local, "none", "ours", "local", **more
    )


def runs(*accuracies, **more):
    return [
        {
            "seed": seed,
            "accuracy": a,
            "seconds": {"total": 1.0},
            "versions": {"fedloom": "9"},
            **more,
        }
        for seed, a in enumerate(accuracies)
    ]


# ---- files ----
def test_the_files_are_what_the_generator_writes():
    written = {ROOT / "recipes" / n.path: recipes.text(n) for n in NUMBERS}
    below = {path for path in ON_DISK if path.parent != ROOT / "recipes"}
    assert below == set(written), "run python bench/recipes.py"
    assert [path for path, content in written.items() if path.read_text() != content] == [], (
        "run python bench/recipes.py"
    )


def test_every_recipe_has_a_name_a_run_and_a_source_of_its_own():
    assert len({n.path for n in NUMBERS}) == len(NUMBERS)
    sources = Counter(n.source for n in NUMBERS)
    assert [source for source, times in sources.items() if times > 1] == []
    runs_of = Counter(json.dumps(n.tables, sort_keys=True) for n in NUMBERS)
    assert [tables for tables, times in runs_of.items() if times > 1] == []


@pytest.mark.parametrize("path", ON_DISK, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_says_what_is_printed_and_where(path):
    text = path.read_text()
    recipe = make_recipe(tomllib.loads(text))
    recipe.config()
    where = str(path.relative_to(ROOT))
    assert text.startswith("# ")
    assert f"fedloom run {where}" in text
    assert recipe.expect.source
    if path.parent != ROOT / "recipes":
        assert (recipe.expect.paper > 0) != recipe.expect.source.startswith("none: ")
        assert recipe.expect.seeds >= 3 or recipe.expect.paper < 0


def test_every_paper_has_recipes_and_local_runs_on_the_same_federation():
    assert {n.family for n in NUMBERS} == set(recipes.FAMILIES)
    for n in NUMBERS:
        ours, local = (make_recipe(tables) for tables in recipes.run_tables(n))
        assert local.method == "local"
        assert (local.data, local.partition, local.options) == (
            ours.data,
            ours.partition,
            ours.options,
        )


def test_floors_and_kept_results_belong_to_numbers():
    assert recipes.FLOORS.keys() <= {n.path for n in NUMBERS}
    for name in ("fedstruct", "oneshot", "fedpg", "fedgkc", "fedgh"):
        assert any(recipes.kept_runs(n)[0] for n in NUMBERS if n.kept == name)
    for n in NUMBERS:
        kept, _ = recipes.kept_runs(n)
        assert not kept or kept[0]["settings"]["name"] == n.tables["method"]["name"]
        given = {
            key: value
            for key, value in n.tables["method"].items()
            if key in (kept[0]["settings"] if kept else ())
        }
        assert not kept or given == {key: kept[0]["settings"][key] for key in given}


def test_what_is_held_to_is_the_kept_result_less_the_margin(monkeypatch):
    monkeypatch.setattr(
        recipes,
        "kept_results",
        lambda name: {
            "ours": [{"accuracy": 0.80, "seconds": 60.0}, {"accuracy": 0.82, "seconds": 60.0}]
        },
    )
    assert recipes.expectation(number())["at_least"] == 81.0 - recipes.MARGIN
    assert recipes.expectation(number())["minutes"] == 1.5
    monkeypatch.setattr(recipes, "kept_results", lambda name: {})
    assert recipes.expectation(number())["at_least"] == 0
    assert "Not run over seeds yet" in recipes.text(number())


def test_recipes_run_in_the_engine_that_made_the_kept_results(monkeypatch):
    monkeypatch.setattr(
        recipes, "kept_results", lambda name: {"ours": [{"engine": "stacked"}], "local": [{}]}
    )
    ours, local = recipes.run_tables(number())
    assert ours["run"] == {"engine": "stacked"}
    assert "run" not in local


# ---- verdicts ----
@pytest.mark.parametrize(
    ("ours", "gap", "name"),
    [(80.0, "+0.0", "reached"), (81.5, "+1.5", "reached"), (81.6, "+1.6", "above"), (79.96, "+0.0", "reached"),
     (78.5, "-1.5", "within 1.5"), (78.4, "-1.6", "short by 1.6"), (None, "-", "-")],
)  # fmt: skip
def test_gaps_have_names(ours, gap, name):
    assert reproduce.compare(ours, 80.0) == (gap, name)


def test_what_is_not_printed_has_no_gap():
    assert reproduce.compare(80.0, None) == ("-", "-")


def test_a_score_that_one_run_lacks_is_not_known():
    assert reproduce.percent([{"accuracy": 0.5}, {"accuracy": 0.7}], "accuracy") == pytest.approx(
        60
    )
    assert reproduce.percent([{"accuracy": 0.5}, {"accuracy": None}], "accuracy") is None
    assert reproduce.percent([{"accuracy": 0.5}], "auc") is None
    assert reproduce.percent([], "accuracy") is None


def test_below_what_it_is_held_to_fails_and_a_gap_to_the_paper_does_not():
    known = {"ours": runs(0.70, 0.72), "local": runs(0.60, 0.62)}
    expect = make_recipe({"expect": {"at_least": 70.0}}).expect
    said, holds = reproduce.line(number(), known, expect)
    assert holds
    assert "ours 71.0 ± 1.4 | Local 61.0 ± 1.4 | paper 80, gap -9.0: short by 9.0" in said
    said, holds = reproduce.line(number(), known, replace(expect, at_least=71.5))
    assert not holds
    assert "NOT what it is held to, 71.5" in said
    assert not reproduce.line(number(), known, replace(expect, at_most=70.5))[1]


def test_the_short_ones_are_some_of_each_paper_variants_last():
    one, two = (
        [number(f"{family}/x-louvain10{v}.toml") for v in ("", "-a", "-b", "-c")]
        for family in ("fedgkc", "fedgh")
    )
    minutes = dict(
        zip(
            [n.path for n in (*one, *two)],
            [2.0, 1.0, 3.0, math.inf, 50.0, 60.0, math.inf, 70.0],
            strict=True,
        )
    )
    chosen = [n.path for n in reproduce.short_ones([*one, *two], minutes, 10)]
    assert chosen == [
        "fedgkc/x-louvain10.toml",
        "fedgh/x-louvain10.toml",
        "fedgkc/x-louvain10-a.toml",
    ]


# ---- tables ----
@pytest.fixture
def made_up(monkeypatch):
    kept = {
        "ours": [{"accuracy": 0.79}, {"accuracy": 0.79}],
        "local": [{"accuracy": 0.75}, {"accuracy": 0.77}],
    }
    monkeypatch.setattr(recipes, "kept_results", lambda name: kept)
    monkeypatch.setattr(reproduce, "made_when", lambda name, label: "2026-01-02 abcdef0")
    return number()


def test_a_number_that_was_run_stands_before_one_that_is_kept(made_up):
    known = {made_up.path: reproduce.entry(made_up, runs(0.82, 0.84), runs(0.70, 0.70))}
    (row,) = reproduce.rows_of(made_up, known)
    assert row[:7] == ["A paper, Table 1", "2", "83.0 ± 1.4", "70.0 ± 0.0", "80.0", "+3.0", "above"]
    assert row[7].startswith("run 2")
    assert row[8] == "`python bench/reproduce.py recipes/fedgkc/x-louvain10.toml`"
    (row,) = reproduce.rows_of(made_up, {})
    assert row[2:8] == [
        "79.0 ± 0.0",
        "76.0 ± 1.4",
        "80.0",
        "-1.0",
        "within 1.5",
        "kept, not run now: 2026-01-02 abcdef0",
    ]


def test_other_metrics_have_rows_of_their_own_and_what_nobody_ran_says_so(made_up):
    both = replace(made_up, also={"f1_macro": 61.5})
    known = {both.path: reproduce.entry(both, runs(0.8, f1_macro=0.58), runs(0.7, f1_macro=0.4))}
    rows = reproduce.rows_of(both, known)
    assert rows[1][:7] == [
        "A paper, Table 1, macro-F1",
        "1",
        "58.0",
        "40.0",
        "61.5",
        "-3.5",
        "short by 3.5",
    ]
    (row,) = reproduce.rows_of(replace(made_up, label="else"), {})
    assert row[2:8] == ["-", "76.0 ± 1.4", "80.0", "-", "-", "not run"]
    assert reproduce.summary([*rows, row]) == (
        "printed numbers: 3; 1 reached (0 of them more than 1.5 points above), 0 within 1.5 points below, 1 short, 1 not run; "
        "more than Local in 2 of 2."
    )


def test_results_are_written_read_again_and_dropped_when_the_recipe_changes(made_up, tmp_path):
    target = tmp_path / "results.md"
    target.write_text("before\n<!-- reproduction -->\n<!-- /reproduction -->\nafter\n")
    known = {made_up.path: reproduce.entry(made_up, runs(0.82, 0.84), runs(0.70, 0.70))}
    reproduce.write(target, [made_up], known, "python bench/reproduce.py")
    text, kept = target.read_text(), tmp_path / "results-reproduction.json"
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "- **FedGKC**: printed numbers: 1; 1 reached" in text
    assert "### FedGKC: printed numbers\n\n| what is printed |" in text
    assert "cores. fedloom 9." in text
    again = reproduce.remembered(kept, [made_up])
    assert again == known
    reproduce.write(target, [made_up], again, "python bench/reproduce.py")
    assert target.read_text() == text
    changed = replace(made_up, tables={**made_up.tables, "method": {"name": "fedavg", "rounds": 3}})
    assert reproduce.remembered(kept, [changed]) == {}
    assert reproduce.remembered(tmp_path / "nothing.json", [made_up]) == {}


def test_runs_that_were_only_taken_from_where_they_are_kept_keep_their_date(made_up):
    before = {**reproduce.entry(made_up, runs(0.82), runs(0.70)), "date": "2026-01-02"}
    assert reproduce.newer(reproduce.entry(made_up, runs(0.82), runs(0.70)), before) is before
    assert (
        reproduce.newer(reproduce.entry(made_up, runs(0.83), runs(0.70)), before)["date"]
        > "2026-01-02"
    )
    assert reproduce.newer(before, None) is before


# ---- the command ----
@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command on two made-up recipes of the repository, the sweep replaced by what `outcome` gives."""
    target = tmp_path / "results.md"
    target.write_text("<!-- reproduction -->\n<!-- /reproduction -->\n")

    def go(outcome, *arguments):
        monkeypatch.setattr(reproduce, "run", outcome)
        monkeypatch.setattr(reproduce.fedgh, "remember_pseudo_graphs", lambda: None)
        monkeypatch.setattr(
            sys, "argv", ["reproduce.py", "--target", str(target), *map(str, arguments)]
        )
        with pytest.raises(SystemExit) as ended:
            reproduce.main()
        return ended.value.code, target

    return go


TWO = [ROOT / "recipes/fedgkc/cora-louvain5.toml", ROOT / "recipes/fedgkc/cora-louvain10.toml"]


def test_a_failed_recipe_is_named_and_the_others_go_on(command, capsys):
    def outcome(n, workers):
        if n.path == "fedgkc/cora-louvain5.toml":
            raise RuntimeError("3 runs failed, the first of them x: no memory")
        return runs(0.9, 0.9, 0.9, accuracy_mean=0.9), runs(0.7, 0.7, 0.7, accuracy_mean=0.7)

    code, target = command(outcome, *TWO)
    said = capsys.readouterr().out
    assert code == 1
    assert (
        "[1/2] fedgkc/cora-louvain5.toml: FAILED: 3 runs failed, the first of them x: no memory"
        in said
    )
    assert (
        "[2/2] fedgkc/cora-louvain10.toml: ours 90.0 ± 0.0 | Local 70.0 ± 0.0 | paper 80.71, gap +9.3: above"
        in said
    )
    assert list(json.loads(target.with_name("results-reproduction.json").read_text())) == [
        "fedgkc/cora-louvain10.toml"
    ]


def test_a_regression_is_a_failure_and_what_is_written_can_be_made_again(command, capsys):
    found = iter([0.9, 0.5])
    code, target = command(
        lambda *_: (runs(0.9, accuracy_mean=next(found)), runs(0.7, accuracy_mean=0.7)), *TWO
    )
    assert code == 1
    assert "NOT what it is held to, 79.3" in capsys.readouterr().out
    first = target.read_text().splitlines()
    code, target = command(lambda *_: pytest.fail("nothing is to be run"), "--write")
    assert code == 0
    assert [line for line in target.read_text().splitlines() if "Made by" not in line] == [
        line for line in first if "Made by" not in line
    ]


def test_workers_and_seeds_reach_the_sweep(monkeypatch):
    asked = {}

    def sweep(tables, seeds, report, kept, workers):
        asked.update(labels=list(tables), seeds=seeds, workers=workers)
        return {"ours": runs(0.5), "local": runs(0.4)}

    monkeypatch.setattr(reproduce, "sweep", sweep)
    assert reproduce.run(number(seeds=5), 1) == (runs(0.5), runs(0.4))
    assert asked == {"labels": ["ours", "local"], "seeds": 5, "workers": 1}


def test_when_kept_results_were_made_is_known_from_git():
    here = subprocess.run(
        ["git", "log", "-1", "--", "docs"], cwd=ROOT, capture_output=True, check=False
    )
    if here.returncode or not here.stdout:
        pytest.skip("no history here")
    made = reproduce.made_when("fedstruct", "cora, random, 10 clients: Local")
    assert len(made.split()) == 2
    assert reproduce.made_when("fedstruct", "no such label") == ""
