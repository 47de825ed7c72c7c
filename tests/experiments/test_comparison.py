"""Comparisons and their figures, made of run folders: the numbers are the folders'."""

import csv
import io
import json
from statistics import mean, stdev

import pytest
from tests.experiments.test_grid import nothing, toy

from fedloom.errors import ConfigError, DataError
from fedloom.experiments.executor import Processes, execute
from fedloom.experiments.grid import cells
from fedloom.experiments.report import comparison
from fedloom.experiments.report.comparison import (
    compare,
    local_beside,
    to_csv,
    to_latex,
    to_markdown,
    write_tables,
)
from fedloom.experiments.report.figures import _cut, _frontier, figures
from fedloom.experiments.run_folder import gather


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """local, fedavg and central, three seeds each, on a toy."""
    out = tmp_path_factory.mktemp("grid")
    tables = toy("fedavg,central", method={"rounds": 4}, run={"evaluate_every": 2})
    tables["compare"]["seeds"] = 3
    assert not execute(cells(tables, out), Processes(2), nothing).failed
    return out


@pytest.fixture(scope="module")
def found(folder):
    return compare(*gather([folder]))


def of(folder, method):
    known = [json.loads(path.read_text()) for path in folder.glob(f"*-{method}-*/summary.json")]
    return sorted((s for s in known if s["method"] == method), key=lambda s: s["seed"])


# ---- tables ----
def test_the_tables_numbers_are_the_folders(folder, found):
    assert found.rows == ["local", "central", "fedavg"]
    (task,) = found.tasks
    assert task == "synthetic, 3 clients by random"
    for row, entry in found.on(task).items():
        scores = [s["accuracy"] for s in of(folder, row)]
        assert entry.score == pytest.approx((mean(scores), stdev(scores)))
        assert entry.seconds == pytest.approx(mean(s["seconds"]["total"] for s in of(folder, row)))
        assert entry.bytes_sent == pytest.approx(
            mean(s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"] for s in of(folder, row))
        )
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(to_csv(found)))}
    assert float(rows["fedavg"]["mean"]) == mean(s["accuracy"] for s in of(folder, "fedavg"))
    assert rows["fedavg"]["seeds"] == "3"
    assert rows["local"]["gain over local"] == ""


def test_best_second_and_tests(folder, found):
    entries = found.on(found.tasks[0])
    ranked = sorted(entries, key=lambda row: -entries[row].score.mean)
    assert [entries[row].mark for row in ranked] == ["best", "second", ""]
    assert entries[ranked[0]].against_best is None
    pairs = [
        100 * (a["accuracy"] - b["accuracy"])
        for ours, alone in zip(of(folder, "fedavg"), of(folder, "local"), strict=True)
        for a, b in zip(ours["per_client"], alone["per_client"], strict=True)
    ]
    assert entries["fedavg"].gain.mean == pytest.approx(mean(pairs))
    assert entries["fedavg"].gain.up == sum(p > 0 for p in pairs)


def test_exports_mark_best_and_second(found, tmp_path):
    entries = found.on(found.tasks[0])
    best, second = (
        next(row for row, e in entries.items() if e.mark == mark) for mark in ("best", "second")
    )
    text = to_markdown(found)
    assert f"| {best} | **{entries[best].score}** |" in text
    assert f"| {second} | *{entries[second].score}*" in text
    latex = to_latex(found)
    assert rf"{best} & \textbf{{{entries[best].score}}}".replace(" ± ", r" $\pm$ ") in latex
    assert latex.count(r"\\") == 4
    assert [p.name for p in write_tables(found, tmp_path / "x")] == [
        "table.csv",
        "table.md",
        "table.tex",
    ]


def test_names_in_latex_are_escaped():
    assert comparison._escaped("a_b & 50%") == r"a\_b \& 50\%"


def test_another_metric(found, folder):
    other = compare(*gather([folder]), metric="f1_macro")
    assert other.on(other.tasks[0])["fedavg"].score.mean == mean(
        s["f1_macro"] for s in of(folder, "fedavg")
    )
    with pytest.raises(ConfigError, match=r"metric 'acuracy'\. Did you mean 'accuracy'"):
        compare([], metric="acuracy")


def test_nothing_to_compare_is_an_error_that_says_why(tmp_path):
    with pytest.raises(DataError, match=r"no completed run to compare; .*there is no run folder"):
        compare(*gather([tmp_path]))


def test_a_method_that_lacks_a_seed_is_named_and_left_out(folder):
    runs, left_out = gather([folder])
    fewer = [r for r in runs if (r.summary["method"], r.summary["seed"]) != ("fedavg", 1)]
    found = compare(fewer, left_out)
    assert found.rows == ["local", "central"]
    assert [each.reason for each in found.left_out] == [
        f"fedavg on {found.tasks[0]} has no run with seed 1"
    ] * 2


def test_the_same_run_twice_counts_once(folder):
    runs, left_out = gather([folder, folder])
    found = compare(runs, left_out)
    assert len(found.left_out) == 9
    assert all(each.reason.startswith("the same settings and seed as") for each in found.left_out)
    assert {len(e.runs) for e in found.entries.values()} == {3}


def test_variants_of_a_method_are_told_apart_by_what_differs(tmp_path):
    one = toy("fedprox", method={"rounds": 1, "fedprox": {"mu": 0.5}})
    two = toy("fedprox", method={"rounds": 1, "fedprox": {"mu": 0.25}})
    assert not execute([*cells(one, tmp_path), *cells(two, tmp_path)], Processes(2), nothing).failed
    found = compare(*gather([tmp_path]))
    assert sorted(found.rows) == ["fedprox (mu=0.25)", "fedprox (mu=0.5)", "local"]


def test_who_stops_earlier_or_looks_less_often_is_another_row(tmp_path):
    grids = [toy("fedavg", method={"rounds": 2}, run={"evaluate_every": every}) for every in (1, 2)]
    assert not execute(
        [cell for tables in grids for cell in cells(tables, tmp_path)], Processes(2), nothing
    ).failed
    found = compare(*gather([tmp_path]))
    assert sorted(found.rows) == [
        f"{row} (evaluate_every={every})" for row in ("fedavg", "local") for every in (1, 2)
    ]
    assert not found.left_out
    entries = found.on(found.tasks[0])
    for every in (1, 2):
        assert (
            local_beside(entries[f"fedavg (evaluate_every={every})"], entries)
            is entries[f"local (evaluate_every={every})"]
        )


def test_models_are_compared_with_local_of_the_same_model(tmp_path):
    tables = toy("fedavg", method={"rounds": 1})
    tables["compare"]["models"] = "gcn-2x4,mlp-2x4"
    assert not execute(cells(tables, tmp_path), Processes(2), nothing).failed
    found = compare(*gather([tmp_path]))
    entries = found.on(found.tasks[0])
    alone = {row: e for row, e in entries.items() if row.startswith("local")}
    assert set(alone) == {"local (model=gcn-2x4)", "local (model=mlp-2x4)"}
    for spec in ("gcn-2x4", "mlp-2x4"):
        ours, local = entries[f"fedavg (model={spec})"], alone[f"local (model={spec})"]
        pairs = comparison.paired([r.summary for r in ours.runs], [r.summary for r in local.runs])
        assert ours.gain.mean == pytest.approx(mean(pairs))


def test_who_knew_of_cut_edges_is_said(tmp_path):
    tables = toy("fedavg,fedgcn", method={"rounds": 1}, run={"engine": "stacked"})
    assert not execute(cells(tables, tmp_path), Processes(2), nothing).failed
    found = compare(*gather([tmp_path]))
    assert "Of the edges that the division cut, fedgcn knew; the others did not." in to_markdown(
        found
    )
    alone = compare(
        [run for e in found.entries.values() for run in e.runs if run.summary["method"] == "fedgcn"]
    )
    assert "knew" not in to_markdown(alone)


# ---- figures ----
def by_id(found):
    return {
        figure["id"].removesuffix("-synthetic-3-clients-by-random"): figure
        for figure in figures(found)
    }


def test_every_figure_is_plain_data_and_has_what_renderers_need(found):
    made = figures(found)
    assert json.loads(json.dumps(made)) == made
    assert len({figure["id"] for figure in made}) == len(made)
    for figure in made:
        assert {"id", "title", "caption", "section", "kind"} <= figure.keys()
        assert figure["kind"] in ("lines", "points", "bars", "heat", "table")


def test_curves_are_the_histories(folder, found):
    figure = by_id(found)["convergence"]
    fedavg = next(s for s in figure["series"] if s["name"] == "fedavg")
    histories = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*-fedavg-*/history.jsonl")
    ]
    assert fedavg["x"] == [2, 4]
    for k, number in enumerate((2, 4)):
        scores = [
            next(e["accuracy"] for e in history if e["round"] == number) for history in histories
        ]
        assert fedavg["y"][k] == pytest.approx(mean(scores), abs=1e-5)
        assert fedavg["high"][k] - fedavg["y"][k] == pytest.approx(stdev(scores), abs=1e-4)


def test_who_gains(folder, found):
    made = by_id(found)
    points = next(s for s in made["gains"]["series"] if s["name"] == "fedavg")
    alone = [c["accuracy"] for s in of(folder, "local") for c in s["per_client"]]
    together = [c["accuracy"] for s in of(folder, "fedavg") for c in s["per_client"]]
    assert points["x"] == pytest.approx(alone, abs=1e-5)
    assert points["y"] == pytest.approx(together, abs=1e-5)
    assert {s["name"] for s in made["gains"]["series"]} == {"fedavg"}  # central has no such clients
    ((row, up, down, same, *_),) = made["gains-table"]["rows"]
    assert (row, up + down + same) == ("fedavg", 9)
    assert up == sum(b > a for a, b in zip(alone, together, strict=True))


def test_traffic_points_are_what_travelled_until_the_best_round(folder, found):
    figure = by_id(found)["traffic"]
    (series,) = figure["series"]
    assert {level["name"] for level in figure["levels"]} == {"local", "central"}
    sent = []
    for path in folder.glob("*-fedavg-*/summary.json"):
        s = json.loads(path.read_text())
        entries = [
            json.loads(line) for line in (path.parent / "history.jsonl").read_text().splitlines()
        ]
        sent.append(
            max(e["bytes_up"] + e["bytes_down"] for e in entries if e["round"] <= s["best_round"])
        )
    assert series["x"] == pytest.approx([mean(sent)], rel=1e-4)
    assert figure["frontier"] == [[series["x"][0], series["y"][0]]]


def test_heat_maps_are_the_holdings(folder, found):
    made = by_id(found)
    held = json.loads(next(folder.glob("*-local-*-s0-*/holdings.json")).read_text())["clients"]
    assert made["labels"]["values"] == [[n or None for n in c["labels"]] for c in held]
    assert made["homophily"]["values"] == [
        pytest.approx(c["homophily_per_class"], abs=1e-4) for c in held
    ]


def test_every_run_is_listed_with_its_hash(folder, found):
    listed = by_id(found)["runs"]["rows"]
    assert len(listed) == 9
    hashes = {
        json.loads(path.read_text())["history_hash"][:16] for path in folder.glob("*/summary.json")
    }
    assert {row[8] for row in listed} == hashes


def test_the_frontier_is_what_nobody_beats_for_less():
    assert _frontier([(3, 0.5), (1, 0.4), (2, 0.3), (4, 0.5), (5, 0.9), (1, 0.2)]) == [
        (1, 0.4),
        (3, 0.5),
        (5, 0.9),
    ]
    assert _frontier([]) == []


def test_an_axis_begins_where_what_counts_can_be_seen():
    good, late = {"y": [0.7, 0.8, 0.81]}, {"y": [0.1, 0.5, 0.79]}
    assert _cut([good, good]) == ({}, "")
    assert _cut([good, late]) == ({"from": 0.67}, " What is below 67 % is not shown.")
    assert _cut([{"y": []}]) == ({}, "")
