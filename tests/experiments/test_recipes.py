"""The recipes of the papers are up to date, and bench/reproduce.py reports their results."""

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.errors import ConfigError, DataError
from fedloom.experiments import recipe_files
from fedloom.experiments.recipe import make_recipe
from fedloom.experiments.recipe_files import RECIPES, entries, find_tables, merge, papers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import recipes  # noqa: E402  # modules of bench/, which is not a package
import reproduce  # noqa: E402

NUMBERS = recipes.numbers()
ALL = {f"{paper}/{entry}": tables for paper in papers() for entry, tables in entries(paper).items()}


def number(name="fedgkc/x-louvain-10", paper=80.0, **more):
    tables = {
        "data": {"dataset": "x"},
        "partition": {"name": "louvain", "clients": 10},
        "method": {"name": "fedavg"},
    }
    local = {**tables, "method": {"name": "local"}}
    return recipes.Number(
        name, "A paper, Table 1", paper, "", tables, local, "none", "ours", "local", **more
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


# ---- recipes by name ----
def test_an_entry_is_merged_with_the_base_table_by_table():
    base = {"data": {"split": "a", "dataset": "x"}, "run": {"seed": 1}}
    entry = {"data": {"dataset": "y"}, "method": {"name": "local"}}
    assert merge(base, entry) == {
        "data": {"split": "a", "dataset": "y"},
        "run": {"seed": 1},
        "method": {"name": "local"},
    }
    assert base["data"]["dataset"] == "x"


def test_a_recipe_is_found_by_name_or_by_path(tmp_path, monkeypatch):
    found = find_tables("opfgl/cora-louvain-plus-10")
    assert found["method"]["name"] == "opfgl"
    assert found["partition"] == {"name": "louvain+", "clients": 10, "seed": 42}
    for name in ("mine.toml", "mine"):
        (tmp_path / name).write_text("[method]\nname = 'local'\n")
        monkeypatch.chdir(tmp_path)
        assert find_tables(name) == {"method": {"name": "local"}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("opfgl/cora-louvan-plus-10", "recipe of opfgl: 'cora-louvan-plus-10'. Did you mean "
         "'cora-louvain-plus-10'.*Valid: .*citeseer-metis-plus-20"),
        ("opfl/cora-louvain-plus-10", "unknown recipe 'opfl/cora-louvain-plus-10'. Did you mean "
         "'opfgl/cora-louvain-plus-10'.*papers: examples, fedgh, fedgkc"),
        ("cora-louvain-plus-10", "unknown recipe .*Did you mean 'opfgl/cora-louvain-plus-10'"),
        ("opfgl", "recipe 'opfgl' is a paper; give one of its recipes: opfgl/cora-louvain-plus-10"),
        ("", "unknown recipe ''. Valid: a TOML file, or PAPER/ENTRY"),
    ],
)  # fmt: skip
def test_an_unknown_recipe_names_the_nearest_and_the_valid_ones(name, words):
    with pytest.raises(ConfigError, match=words):
        find_tables(name)


def test_a_missing_file_and_an_unknown_paper_are_named():
    with pytest.raises(DataError, match=r"there is no file 'missing\.toml'"):
        find_tables("missing.toml")
    with pytest.raises(ConfigError, match=r"paper with recipes: 'opfl'\. Did you mean 'opfgl'"):
        entries("opfl")


# ---- files ----
def test_the_files_are_up_to_date():
    written = recipes.files()
    by_hand = {RECIPES / f"{name}.toml" for name in recipes.BY_HAND}
    assert set(RECIPES.glob("*.toml")) == set(written) | by_hand
    stale = [path.name for path, content in written.items() if path.read_text() != content]
    assert stale == [], "run python bench/recipes.py"


def test_an_entry_gives_the_tables_of_its_number():
    for n in NUMBERS:
        assert json.dumps(ALL[n.name], sort_keys=True) == json.dumps(
            recipes.resolved(n), sort_keys=True
        )
    others = {name for name in ALL if name.partition("/")[0] in recipes.BY_HAND}
    assert ALL.keys() == {n.name for n in NUMBERS} | others
    assert (len(NUMBERS), len(others)) == (229, 12)


def test_every_number_has_a_name_a_recipe_and_a_source_of_its_own():
    assert len({n.name for n in NUMBERS}) == len(NUMBERS)
    sources = Counter(n.source for n in NUMBERS)
    assert [source for source, times in sources.items() if times > 1] == []
    runs_of = Counter(json.dumps(n.tables, sort_keys=True) for n in NUMBERS)
    assert [tables for tables, times in runs_of.items() if times > 1] == []


@pytest.mark.parametrize("paper", papers())
def test_recipes_are_valid_and_name_the_source_of_the_expected_value(paper):
    for name, tables in entries(paper).items():
        recipe = make_recipe(tables)
        recipe.config()
        expect = recipe.expect
        assert expect.source, name
        if paper != recipes.EXAMPLES:
            assert (expect.paper > 0) != expect.source.startswith("none: "), name
            assert expect.seeds >= 3 or expect.paper < 0, name


def test_a_file_says_how_its_recipes_are_run():
    for paper in papers():
        text = (RECIPES / f"{paper}.toml").read_text()
        assert f"fedloom run {paper}/" in text
        assert max(len(line) for line in text.splitlines() if "name = " not in line) <= 110


def test_every_paper_has_recipes_and_local_runs_on_the_same_federation():
    assert {n.group for n in NUMBERS} == set(recipes.PAPERS)
    for n in NUMBERS:
        ours, local = (make_recipe(tables) for tables in recipes.run_tables(n))
        assert local.method == "local"
        assert (local.data, local.partition, local.options) == (
            ours.data,
            ours.partition,
            ours.options,
        )


def test_floors_and_kept_results_belong_to_numbers():
    assert recipes.FLOORS.keys() <= {n.name for n in NUMBERS}
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


def test_the_lower_bound_is_the_kept_result_minus_the_margin(monkeypatch):
    kept = [{"accuracy": 0.80, "seconds": 60.0}, {"accuracy": 0.82, "seconds": 60.0}]
    monkeypatch.setattr(recipes, "kept_results", lambda name: {"ours": kept})
    assert recipes.expectation(number())["at_least"] == 81.0 - recipes.MARGIN
    assert recipes.expectation(number())["minutes"] == 1.5
    assert "# Kept: 81.0 over 2 seeds" in recipes.text("fedgkc", [number()])
    monkeypatch.setattr(recipes, "kept_results", lambda name: {})
    assert recipes.expectation(number())["at_least"] == 0
    assert "Kept: " not in recipes.text("fedgkc", [number()])


def test_what_most_recipes_share_is_in_the_base(tmp_path, monkeypatch):
    one, two, three = (
        number(f"fedgkc/{name}", paper=p) for name, p in (("a", 1.0), ("b.5", 2.0), ("c", 3.0))
    )
    three.tables["method"]["rounds"] = 5
    monkeypatch.setattr(recipe_files, "RECIPES", tmp_path)
    (tmp_path / "fedgkc.toml").write_text(recipes.text("fedgkc", [one, two, three]))
    base = recipes.common_tables([recipes.resolved(n) for n in (one, two, three)])
    assert base["partition"] == {"name": "louvain", "clients": 10}
    assert base["method"] == {"name": "fedavg"}
    assert "paper" not in base["expect"]
    assert entries("fedgkc") == {
        n.name.removeprefix("fedgkc/"): recipes.resolved(n) for n in (one, two, three)
    }


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
    [
        (80.0, "+0.0", "reached"),
        (81.5, "+1.5", "reached"),
        (81.6, "+1.6", "above"),
        (79.96, "+0.0", "reached"),
        (78.5, "-1.5", "within 1.5"),
        (78.4, "-1.6", "short by 1.6"),
        (None, "-", "-"),
    ],
)
def test_gaps_have_names(ours, gap, name):
    assert reproduce.compare(ours, 80.0) == (gap, name)


def test_without_a_printed_number_there_is_no_gap():
    assert reproduce.compare(80.0, None) == ("-", "-")


def test_a_mean_is_unknown_if_one_run_has_no_score():
    mean = reproduce.percent([{"accuracy": 0.5}, {"accuracy": 0.7}], "accuracy")
    assert mean == pytest.approx(60)
    assert reproduce.percent([{"accuracy": 0.5}, {"accuracy": None}], "accuracy") is None
    assert reproduce.percent([{"accuracy": 0.5}], "auc") is None
    assert reproduce.percent([], "accuracy") is None


def test_a_result_below_its_bound_fails_and_a_gap_to_the_paper_does_not():
    known = {"ours": runs(0.70, 0.72), "local": runs(0.60, 0.62)}
    expect = make_recipe({"expect": {"at_least": 70.0}}).expect
    text, holds = reproduce.line(number(), known, expect)
    assert holds
    assert "ours 71.0 ± 1.4 | Local 61.0 ± 1.4 | paper 80, gap -9.0: short by 9.0" in text
    text, holds = reproduce.line(number(), known, replace(expect, at_least=71.5))
    assert not holds
    assert "OUT OF BOUNDS, expected 71.5" in text
    assert not reproduce.line(number(), known, replace(expect, at_most=70.5))[1]


def test_a_budget_of_time_is_shared_by_the_papers_and_variants_come_last():
    one, two = (
        [number(f"{paper}/x-louvain-10{v}") for v in ("", "-a", "-b", "-c")]
        for paper in ("fedgkc", "fedgh")
    )
    minutes = dict(
        zip(
            [n.name for n in (*one, *two)],
            [2.0, 1.0, 3.0, math.inf, 50.0, 60.0, math.inf, 70.0],
            strict=True,
        )
    )
    chosen = [n.name for n in reproduce.short_ones([*one, *two], minutes, 10)]
    assert chosen == ["fedgkc/x-louvain-10", "fedgh/x-louvain-10", "fedgkc/x-louvain-10-a"]


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


def test_a_fresh_result_replaces_the_kept_one(made_up):
    known = {made_up.name: reproduce.entry(made_up, runs(0.82, 0.84), runs(0.70, 0.70))}
    (row,) = reproduce.rows_of(made_up, known)
    assert row[:7] == ["A paper, Table 1", "2", "83.0 ± 1.4", "70.0 ± 0.0", "80.0", "+3.0", "above"]
    assert row[7].startswith("run 2")
    assert row[8] == "`python bench/reproduce.py fedgkc/x-louvain-10`"
    (row,) = reproduce.rows_of(made_up, {})
    assert row[2:8] == [
        "79.0 ± 0.0",
        "76.0 ± 1.4",
        "80.0",
        "-1.0",
        "within 1.5",
        "kept, not run now: 2026-01-02 abcdef0",
    ]


def test_other_metrics_have_rows_of_their_own_and_missing_runs_are_shown(made_up):
    both = replace(made_up, also={"f1_macro": 61.5})
    known = {both.name: reproduce.entry(both, runs(0.8, f1_macro=0.58), runs(0.7, f1_macro=0.4))}
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
        "printed numbers: 3; 1 reached (0 of them more than 1.5 points above), "
        "0 within 1.5 points below, 1 short, 1 not run; more than Local in 2 of 2."
    )


def test_results_are_written_and_read_and_dropped_if_the_recipe_changes(made_up, tmp_path):
    target = tmp_path / "results.md"
    target.write_text("before\n<!-- reproduction -->\n<!-- /reproduction -->\nafter\n")
    known = {made_up.name: reproduce.entry(made_up, runs(0.82, 0.84), runs(0.70, 0.70))}
    kept = tmp_path / "reproduction.json"
    reproduce.write(target, kept, [made_up], known, "python bench/reproduce.py")
    text = target.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "- **FedGKC**: printed numbers: 1; 1 reached" in text
    assert "### FedGKC: printed numbers\n\n| what is printed |" in text
    assert "cores. fedloom 9." in text
    again = reproduce.remembered(kept, [made_up])
    assert again == known
    reproduce.write(target, kept, [made_up], again, "python bench/reproduce.py")
    assert target.read_text() == text
    changed = replace(made_up, tables={**made_up.tables, "method": {"name": "fedavg", "rounds": 3}})
    assert reproduce.remembered(kept, [changed]) == {}
    assert reproduce.remembered(tmp_path / "nothing.json", [made_up]) == {}


def test_cached_runs_keep_their_date(made_up):
    before = {**reproduce.entry(made_up, runs(0.82), runs(0.70)), "date": "2026-01-02"}
    assert reproduce.newer(reproduce.entry(made_up, runs(0.82), runs(0.70)), before) is before
    later = reproduce.newer(reproduce.entry(made_up, runs(0.83), runs(0.70)), before)
    assert later["date"] > "2026-01-02"
    assert reproduce.newer(before, None) is before


# ---- the command ----
@pytest.fixture
def command(monkeypatch, tmp_path):
    """Returns a function that runs the command. `outcome` replaces the runs."""
    target = tmp_path / "results.md"
    target.write_text("<!-- reproduction -->\n<!-- /reproduction -->\n")

    def go(outcome, *arguments):
        monkeypatch.setattr(reproduce, "run", outcome)
        monkeypatch.setattr(reproduce.fedgh, "remember_pseudo_graphs", lambda: None)
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "reproduce.py",
                "--target",
                str(target),
                "--results",
                str(target.with_name("reproduction.json")),
                *map(str, arguments),
            ],
        )
        with pytest.raises(SystemExit) as ended:
            reproduce.main()
        return ended.value.code, target

    return go


TWO = ["fedgkc/cora-louvain-5", "fedgkc/cora-louvain-10"]


def test_a_failed_recipe_is_named_and_the_others_go_on(command, capsys):
    def outcome(n, workers):
        if n.name == "fedgkc/cora-louvain-5":
            raise RuntimeError("3 runs failed, the first of them x: no memory")
        return runs(0.9, 0.9, 0.9, accuracy_mean=0.9), runs(0.7, 0.7, 0.7, accuracy_mean=0.7)

    code, target = command(outcome, *TWO)
    text = capsys.readouterr().out
    assert code == 1
    assert "[1/2] fedgkc/cora-louvain-5: FAILED: 3 runs failed, the first of them x" in text
    assert (
        "[2/2] fedgkc/cora-louvain-10: ours 90.0 ± 0.0 | Local 70.0 ± 0.0 | "
        "paper 80.71, gap +9.3: above" in text
    )
    kept = json.loads(target.with_name("reproduction.json").read_text())
    assert list(kept) == ["fedgkc/cora-louvain-10"]


def test_a_regression_is_a_failure_and_the_section_can_be_written_again(command, capsys):
    found = iter([0.9, 0.5])
    code, target = command(
        lambda *_: (runs(0.9, accuracy_mean=next(found)), runs(0.7, accuracy_mean=0.7)), *TWO
    )
    assert code == 1
    assert "OUT OF BOUNDS, expected 79.3" in capsys.readouterr().out
    first = target.read_text().splitlines()
    code, target = command(lambda *_: pytest.fail("nothing is to be run"), "--write")
    assert code == 0
    assert [line for line in target.read_text().splitlines() if "Made by" not in line] == [
        line for line in first if "Made by" not in line
    ]


def test_examples_and_recipe_files_can_be_reproduced(command, capsys, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[method]\nname = 'fedavg'\n[expect]\nat_least = 50\nsource = 'here'\n")
    outcome = runs(0.9), runs(0.7)
    code, _ = command(lambda *_: outcome, "examples/cora-louvain-10-fedavg", mine)
    text = capsys.readouterr().out
    assert code == 0
    assert "examples/cora-louvain-10-fedavg: ours 90.0" in text
    assert f"{mine}: ours 90.0" in text


def test_workers_and_seeds_reach_the_sweep(monkeypatch):
    asked = {}

    def sweep(tables, seeds, report, kept, workers):
        asked.update(labels=list(tables), seeds=seeds, workers=workers)
        return {"ours": runs(0.5), "local": runs(0.4)}

    monkeypatch.setattr(reproduce, "sweep", sweep)
    assert reproduce.run(number(seeds=5), 1) == (runs(0.5), runs(0.4))
    assert asked == {"labels": ["ours", "local"], "seeds": 5, "workers": 1}


def test_git_knows_when_kept_results_were_made():
    path = recipes.kept_file("fedstruct").relative_to(ROOT)
    here = subprocess.run(
        ["git", "log", "-1", "--", str(path)], cwd=ROOT, capture_output=True, check=False
    )
    if here.returncode or not here.stdout:
        pytest.skip("no history here")
    made = reproduce.made_when("fedstruct", "cora, random, 10 clients: Local")
    assert len(made.split()) == 2
    assert reproduce.made_when("fedstruct", "no such label") == ""
