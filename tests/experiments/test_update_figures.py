"""The part of a report about clients' updates: there if a run compared them, and short."""

import json
import shutil

import pytest
from tests.experiments.test_page import parse

import fedloom
from fedloom import RunSettings
from fedloom.data.partition import divide
from fedloom.data.synthetic import synthetic
from fedloom.experiments.report.comparison import compare
from fedloom.experiments.report.draw import draw
from fedloom.experiments.report.spec import flat
from fedloom.experiments.report.write import make_page, write_report
from fedloom.experiments.run_folder import gather

EVIL = "</script><b>&'\""


@pytest.fixture(scope="module")
def lied(tmp_path_factory):
    """The folder of a run with 14 clients, of which 2 lie."""
    graph = synthetic(nodes=420, classes=3, features=16, degree=6.0, homophily=0.8, seed=5)
    out = tmp_path_factory.mktemp("lied") / "run"
    fedloom.run(
        {"name": "fedavg", "rounds": 3},
        divide(graph, 14, "random", 0, split="40/20/40"),
        settings=RunSettings(evaluation="global", engine="stacked"),
        adversary={"clients": 2, "attack": "sign-flip"},
        out=out,
    )
    return out


def changed(lied, folder, change):
    """Returns a copy of the run folder whose history entries were changed in place."""
    shutil.copytree(lied, folder)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for entry in lines:
        change(entry)
    (folder / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return folder


def page_of(*folders):
    return make_page(compare(*gather(folders)))


def about_updates(page):
    return [f for f in flat(page["figures"]) if f["id"].startswith("updates-")]


def group_of(page):
    return next(
        f for f in page["figures"] if f["kind"] == "group" and f["id"].startswith("updates")
    )


def test_the_report_shows_who_stands_out_and_who_lied(lied):
    page = page_of(lied)
    norm, cosine, table = about_updates(page)
    summary = json.loads((lied / "summary.json").read_text())
    liars = summary["adversary"]["clients"]
    assert {one["name"] for one in norm["series"][:2]} == {f"{c} (lied)" for c in liars}
    assert len(norm["series"]) == len(cosine["series"]) == len(table["rows"]) == 10
    assert norm["series"][0]["x"] == [1, 2, 3]
    assert min(norm["series"][0]["y"]) > 5
    assert all(-1 <= v <= 1 for one in cosine["series"] for v in one["y"])
    names = [column["name"] for column in table["columns"]]
    rows = [dict(zip(names, row, strict=True)) for row in table["rows"]]
    assert {row["client"]: row["shortened"] for row in rows if row["shortened"]} == summary[
        "clipped"
    ]
    assert {row["client"] for row in rows if row["lied"] == "yes"} == set(liars)
    caption = group_of(page)["caption"]
    assert f"Seed 0: the simulation makes clients {', '.join(liars)} lie (sign-flip)." in caption
    assert "not shown: 4." in caption
    assert table["caption"].startswith("4 less outlying rows")


def test_a_run_that_compared_no_updates_has_no_such_part(lied, tmp_path):
    without = changed(lied, tmp_path / "run", lambda entry: entry.pop("updates", None))
    assert about_updates(page_of(without)) == []
    assert about_updates(page_of(lied)) != []


def test_names_of_clients_are_escaped(lied, tmp_path):
    def rename(entry):
        for row in entry.get("updates", ()):
            row["clients"] = {EVIL + c: pair for c, pair in row["clients"].items()}
            row["clipped"] = [EVIL + c for c in row["clipped"]]

    folder = changed(lied, tmp_path / "run", rename)
    path = write_report(compare(*gather([folder])), tmp_path / "report.html")
    assert EVIL not in path.read_text()
    data = json.loads(parse(path).inside["data"])
    assert all(one["name"].startswith(EVIL) for one in about_updates(data)[0]["series"])


def test_numbers_that_are_not_finite_come_first_and_are_unknown(lied, tmp_path):
    def overflow(entry):
        for row in entry.get("updates", ()):
            row["clients"]["5"], row["clipped"] = [float("inf"), float("nan")], []

    folder = changed(lied, tmp_path / "run", overflow)
    path = write_report(compare(*gather([folder])), tmp_path / "report.html")
    norm, _, table = about_updates(json.loads(parse(path).inside["data"]))
    assert norm["series"][0]["name"].startswith("5")
    assert norm["series"][0]["y"] == [None, None, None]
    assert [cell["text"] for cell in table["rows"][0][5:8]] == ["-", "-", "-"]


def test_a_damaged_report_is_named_and_the_rest_is_shown(lied, tmp_path):
    folder = changed(lied, tmp_path / "run", lambda entry: entry.update(updates=[{"phase": "x"}]))
    page = page_of(folder)
    assert about_updates(page) == []
    assert "updates in history.jsonl" in page["left_out"][0]["reason"]
    assert any(figure["id"].startswith("convergence") for figure in flat(page["figures"]))


def test_the_curves_are_drawn_as_files(lied, tmp_path):
    for figure in about_updates(page_of(lied))[:2]:
        assert draw(figure, tmp_path / f"{figure['id']}.svg").stat().st_size > 1000
