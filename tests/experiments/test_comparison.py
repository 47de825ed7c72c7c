"""Comparisons of run folders and their figures: all numbers equal those in the folders."""

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
    matching_local,
    to_csv,
    to_latex,
    to_markdown,
    write_tables,
)
from fedloom.experiments.report.figures import _cut, _frontier, figures
from fedloom.experiments.report.spec import flat
from fedloom.experiments.run_folder import gather


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of local, fedavg and central on a small graph, with three seeds each."""
    out = tmp_path_factory.mktemp("grid")
    tables = toy("fedavg,central", method={"rounds": 4}, run={"evaluate_every": 2})
    tables["compare"]["seeds"] = 3
    assert not execute(cells(tables, out), Processes(2), nothing).failed
    return out


@pytest.fixture(scope="module")
def found(folder):
    return compare(*gather([folder]))


def summaries(folder, method):
    """The summaries of a method, by seed."""
    known = [json.loads(path.read_text()) for path in folder.glob(f"*-{method}-*/summary.json")]
    return sorted((s for s in known if s["method"] == method), key=lambda s: s["seed"])


# ---- tables ----
def test_tables_have_the_numbers_of_the_folders(folder, found):
    assert found.rows == ["local", "central", "fedavg"]
    (task,) = found.tasks
    assert task == "synthetic, 3 clients by random"
    for row, entry in found.on(task).items():
        scores = [s["accuracy"] for s in summaries(folder, row)]
        assert entry.score == pytest.approx((mean(scores), stdev(scores)))
        assert entry.seconds == pytest.approx(
            mean(s["seconds"]["total"] for s in summaries(folder, row))
        )
        assert entry.bytes_sent == pytest.approx(
            mean(
                s["traffic"]["bytes_up"] + s["traffic"]["bytes_down"]
                for s in summaries(folder, row)
            )
        )
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(to_csv(found)))}
    assert float(rows["fedavg"]["mean"]) == mean(s["accuracy"] for s in summaries(folder, "fedavg"))
    assert rows["fedavg"]["seeds"] == "3"
    assert rows["local"]["gain over local"] == ""


def test_best_and_second_are_marked_and_gains_are_tested(folder, found):
    entries = found.on(found.tasks[0])
    ranked = sorted(("fedavg", "local"), key=lambda row: -entries[row].score.mean)
    assert [entries[row].mark for row in (*ranked, "central")] == ["best", "second", ""]
    assert entries[ranked[0]].against_best is None
    pairs = [
        100 * (a["accuracy"] - b["accuracy"])
        for ours, base in zip(summaries(folder, "fedavg"), summaries(folder, "local"), strict=True)
        for a, b in zip(ours["per_client"], base["per_client"], strict=True)
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


def test_another_metric_can_be_compared(found, folder):
    other = compare(*gather([folder]), metric="f1_macro")
    assert other.on(other.tasks[0])["fedavg"].score.mean == mean(
        s["f1_macro"] for s in summaries(folder, "fedavg")
    )
    with pytest.raises(ConfigError, match=r"metric 'acuracy'\. Did you mean 'accuracy'"):
        compare([], metric="acuracy")


def test_an_empty_folder_is_an_error_with_a_reason(tmp_path):
    with pytest.raises(DataError, match=r"no completed run to compare; .*there is no run folder"):
        compare(*gather([tmp_path]))


def test_a_method_without_one_of_the_seeds_is_left_out(folder):
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


def test_names_of_variants_contain_the_differing_setting(tmp_path):
    one = toy("fedprox", method={"rounds": 1, "fedprox": {"mu": 0.5}})
    two = toy("fedprox", method={"rounds": 1, "fedprox": {"mu": 0.25}})
    assert not execute([*cells(one, tmp_path), *cells(two, tmp_path)], Processes(2), nothing).failed
    found = compare(*gather([tmp_path]))
    assert sorted(found.rows) == ["fedprox (mu=0.25)", "fedprox (mu=0.5)", "local"]


def test_runs_with_another_evaluation_interval_are_another_row(tmp_path):
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
            matching_local(entries[f"fedavg (evaluate_every={every})"], entries)
            is entries[f"local (evaluate_every={every})"]
        )


def test_models_are_compared_with_local_of_the_same_model(tmp_path):
    tables = toy("fedavg", method={"rounds": 1})
    tables["compare"] |= {"models": "gcn-2x4,mlp-2x4", "seeds": 1}
    assert not execute(cells(tables, tmp_path), Processes(2), nothing).failed
    found = compare(*gather([tmp_path]))
    entries = found.on(found.tasks[0])
    rows = {row for row in entries if row.startswith("local")}
    assert rows == {"local (model=gcn-2x4)", "local (model=mlp-2x4)"}
    for spec in ("gcn-2x4", "mlp-2x4"):
        ours, local = entries[f"fedavg (model={spec})"], entries[f"local (model={spec})"]
        pairs = comparison.paired([r.summary for r in ours.runs], [r.summary for r in local.runs])
        assert ours.gain.mean == pytest.approx(mean(pairs))


def test_the_footnote_names_methods_whose_clients_know_cross_edges(tmp_path):
    tables = toy("fedavg,fedgcn", method={"rounds": 1}, run={"engine": "stacked"})
    tables["compare"]["seeds"] = 1
    assert not execute(cells(tables, tmp_path), Processes(2), nothing).failed
    found = compare(*gather([tmp_path]))
    assert "The clients of fedgcn know the edges between them; those" in to_markdown(found)
    fedgcn = compare(
        [run for e in found.entries.values() for run in e.runs if run.summary["method"] == "fedgcn"]
    )
    assert "edges" not in to_markdown(fedgcn)


# ---- figures ----
def by_id(found):
    return {
        figure["id"].removesuffix("-synthetic-3-clients-by-random"): figure
        for figure in flat(figures(found))
    }


def test_every_figure_is_plain_data_with_all_fields(found):
    made = figures(found)
    assert json.loads(json.dumps(made)) == made
    groups = [figure for figure in made if figure["kind"] == "group"]
    every = [*groups, *flat(made)]
    assert len({figure["id"] for figure in every}) == len(every)
    for figure in every:
        assert {"id", "title", "caption", "section", "kind"} <= figure.keys()
        assert figure["kind"] in ("lines", "points", "bars", "heat", "table", "note", "group")
    assert {figure["section"] for figure in every} == {
        "results",
        "classes",
        "clients",
        "cost",
        "settings",
        "data",
        "runs",
    }


def test_curves_show_the_histories(folder, found):
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


def test_gains_compare_each_client_with_local_training(folder, found):
    made = by_id(found)
    points = next(s for s in made["gains"]["series"] if s["name"] == "fedavg")
    local = [c["accuracy"] for s in summaries(folder, "local") for c in s["per_client"]]
    fedavg = [c["accuracy"] for s in summaries(folder, "fedavg") for c in s["per_client"]]
    assert points["x"] == pytest.approx(local, abs=1e-5)
    assert points["y"] == pytest.approx(fedavg, abs=1e-5)
    # central does not have these clients
    assert {s["name"] for s in made["gains"]["series"]} == {"fedavg"}
    ((row, up, down, same, *_),) = made["gains-table"]["rows"]
    assert (row, up + down + same) == ("fedavg", 9)
    assert up == sum(b > a for a, b in zip(local, fedavg, strict=True))


def test_traffic_points_show_the_bytes_sent_until_the_best_round(folder, found):
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


def test_heat_maps_show_the_partition_statistics(folder, found):
    made = by_id(found)
    path = next(folder.glob("*-local-*-s0-*/partition.json"))
    clients = json.loads(path.read_text())["clients"]
    assert made["labels"]["values"] == [[n or None for n in c["labels"]] for c in clients]
    assert made["homophily"]["values"] == [
        pytest.approx(c["homophily_per_class"], abs=1e-4) for c in clients
    ]


def test_every_run_is_listed_with_its_hash(folder, found):
    listed = by_id(found)["runs"]["rows"]
    assert len(listed) == 9
    hashes = {
        json.loads(path.read_text())["history_hash"][:16] for path in folder.glob("*/summary.json")
    }
    assert {row[8] for row in listed} == hashes


def test_no_point_beats_the_frontier_at_lower_cost():
    assert _frontier([(3, 0.5), (1, 0.4), (2, 0.3), (4, 0.5), (5, 0.9), (1, 0.2)]) == [
        (1, 0.4),
        (3, 0.5),
        (5, 0.9),
    ]
    assert _frontier([]) == []


def test_an_axis_leaves_out_low_scores_of_the_first_rounds():
    good, late = {"y": [0.7, *[0.8] * 30]}, {"y": [0.1, *[0.79] * 30]}
    assert _cut([good, good]) == ({}, "")
    assert _cut([good, late]) == ({"from": 0.78}, "Scores below 78 % are not shown.")
    assert _cut([{"y": []}]) == ({}, "")
