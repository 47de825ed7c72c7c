"""The report's page loads nothing from elsewhere. Figures of every kind are drawn as files."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests import pages

from fedloom.errors import ConfigError
from fedloom.experiments.report.draw import draw
from fedloom.experiments.report.html import fill_template, read_parts, write_page
from fedloom.experiments.report.spec import flat

DRAWN = [
    figure
    for figure in flat(pages.every_kind()["figures"])
    if figure["kind"] not in ("table", "note")
]


class Loads(HTMLParser):
    """The addresses that a browser would fetch for a page, and the text of its elements."""

    def __init__(self):
        super().__init__()
        self.addresses, self.inside, self.tag = [], {}, ""

    def handle_starttag(self, tag, attrs):
        self.tag = dict(attrs).get("id") or tag
        self.addresses += [
            value
            for name, value in attrs
            if name in ("src", "href", "srcset", "action", "data", "poster")
        ]

    def handle_data(self, data):
        self.inside[self.tag] = self.inside.get(self.tag, "") + data


def parse(path: Path) -> Loads:
    found = Loads()
    found.feed(path.read_text())
    return found


# ---- the page ----


def test_a_page_loads_nothing(tmp_path):
    write_page(pages.every_kind(), tmp_path / "report.html")
    found = parse(tmp_path / "report.html")
    assert found.addresses == ["data:,"]
    code = found.inside["style"] + found.inside["script"]
    assert not re.search(
        r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|importScripts|import\(|sendBeacon", code
    )
    # The only address is the name of a namespace.
    assert set(re.findall(r"https?://[^\"' ]+", code)) == {"http://www.w3.org/2000/svg"}
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert f"{policy}; img-src data:" in (tmp_path / "report.html").read_text()


def test_text_of_a_page_cannot_end_its_element(tmp_path):
    evil = "</script><script>alert(1)</script><!-- {{data}} \u2028 ü"
    page = pages.page([], title=evil, left_out=[{"folder": evil, "reason": "x"}])
    write_page(page, tmp_path / "report.html")
    found = parse(tmp_path / "report.html")
    assert json.loads(found.inside["data"]) == page
    assert "alert" not in found.inside["script"]
    assert found.inside["title"].strip() == evil  # the parser removes the escapes


def test_names_of_folders_may_contain_invalid_text(tmp_path):
    page = pages.page([], left_out=[{"folder": "a\udcff", "reason": "x"}])
    write_page(page, tmp_path / "report.html")
    data = json.loads(parse(tmp_path / "report.html").inside["data"])
    assert data["left_out"][0]["folder"] == "a\udcff"


def test_numbers_that_json_cannot_represent_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_page(pages.page([{"values": [float("nan")]}]), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_large_report_takes_less_than_15_mb(tmp_path):
    write_page(pages.large(), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 15e6


def test_a_template_needs_all_its_parts():
    assert set(re.findall(r"{{(\w+)}}", read_parts("report.html"))) == {
        "title",
        "style",
        "script",
        "data",
    }
    with pytest.raises(KeyError, match="style"):
        fill_template("report.html", {"title": "t"})


def test_reports_do_not_import_torch():
    modules = ("artifacts", "command", "draw", "figures", "follow", "html", "watch", "write")
    names = ", ".join(f"fedloom.experiments.report.{module}" for module in modules)
    script = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


# ---- pictures ----


OPENINGS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("figure", DRAWN, ids=lambda figure: figure["id"])
def test_every_kind_is_drawn(figure, tmp_path):
    path = draw(figure, tmp_path / "figure.svg")
    assert path.read_bytes().startswith(OPENINGS[".svg"])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".pdf"])
@pytest.mark.parametrize("figure", DRAWN, ids=lambda figure: figure["id"])
def test_every_kind_is_drawn_in_the_other_formats(figure, tmp_path, suffix):
    path = draw(figure, tmp_path / f"figure{suffix}")
    assert path.read_bytes().startswith(OPENINGS[suffix])


def test_the_figures_of_this_module_cover_every_kind():
    assert {figure["kind"] for figure in DRAWN} == {
        "lines",
        "points",
        "bars",
        "heat",
        "image",
        "graph",
        "scatter",
    }


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_files_of_a_figure_are_identical(tmp_path, suffix):
    first, second = (draw(DRAWN[0], tmp_path / f"{k}{suffix}").read_bytes() for k in range(2))
    assert first == second


def test_pictures_have_titles_axes_and_legends(tmp_path):
    text = draw(DRAWN[1], tmp_path / "points.svg").read_text()
    for words in ("Accuracy against traffic", "test accuracy", "1 MB", "80%", "frontier", "fedtgp"):
        assert f"<!-- {words} -->" in text
    text = draw(DRAWN[2], tmp_path / "time.svg").read_text()
    assert "<!-- 2 min -->" in text


def test_a_logarithmic_axis_has_a_place_for_zero(tmp_path):
    spot = {"name": "local", "color": 0, "x": [0], "y": [0.5]}
    other = {"name": "fedavg", "color": 1, "x": [2e6], "y": [0.7]}
    figure = {**DRAWN[1], "series": [spot, other], "frontier": [[0, 0.5], [2e6, 0.7]]}
    assert "<!-- 0 -->" in draw(figure, tmp_path / "points.svg").read_text()


def test_equal_axes_have_the_same_range_and_length(tmp_path, monkeypatch):
    figure = next(one for one in DRAWN if one.get("diagonal"))
    seen = []
    monkeypatch.setattr(
        "fedloom.experiments.report.draw._legend", lambda _, axes: seen.append(axes)
    )
    draw(figure, tmp_path / "equal.svg")
    (axes,) = seen
    assert axes.get_xlim() == axes.get_ylim()
    assert axes.get_aspect() == 1


def test_figures_without_values_are_drawn(tmp_path):
    for kind in ("lines", "points"):
        draw({**DRAWN[0], "kind": kind, "series": []}, tmp_path / "empty.png")
    unknown = {
        "name": "a",
        "color": 0,
        "x": [1, 2],
        "y": [None, None],
        "low": [None, None],
        "high": [None, None],
    }
    draw({**DRAWN[0], "series": [unknown]}, tmp_path / "unknown.png")


def test_unknown_suffixes_and_kinds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must end in .png, .svg, .pdf"):
        draw(DRAWN[0], tmp_path / "figure.gif")
    valid = "bars, graph, heat, image, lines, points, scatter"
    with pytest.raises(ConfigError, match=f"unknown kind of figure 'table'.*Valid: {valid}"):
        draw({"kind": "table"}, tmp_path / "figure.png")
