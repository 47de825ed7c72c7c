"""The report's page is one file that loads nothing; figures are drawn on paper in every kind and format."""

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

DRAWN = [figure for figure in pages.every_kind()["figures"] if figure["kind"] != "table"]


class Loads(HTMLParser):
    """Everything in a page that a browser would fetch, and what is in its elements."""

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
    assert set(re.findall(r"https?://[^\"' ]+", code)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
        in (tmp_path / "report.html").read_text()
    )


def test_what_is_in_a_page_cannot_leave_its_element(tmp_path):
    evil = "</script><script>alert(1)</script><!-- {{data}} \u2028 ü"
    page = pages.page([], title=evil, left_out=[{"folder": evil, "reason": "x"}])
    write_page(page, tmp_path / "report.html")
    found = parse(tmp_path / "report.html")
    assert json.loads(found.inside["data"]) == page
    assert "alert" not in found.inside["script"]
    assert found.inside["title"].strip() == evil  # escaped, and read back


def test_a_folder_whose_name_is_no_text_is_written_too(tmp_path):
    write_page(
        pages.page([], left_out=[{"folder": "a\udcff", "reason": "x"}]), tmp_path / "report.html"
    )
    assert (
        json.loads(parse(tmp_path / "report.html").inside["data"])["left_out"][0]["folder"]
        == "a\udcff"
    )


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_page(pages.page([{"values": [float("nan")]}]), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_large_report_stays_small(tmp_path):
    write_page(pages.large(), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 15e6


def test_templates_have_a_place_for_everything():
    assert set(re.findall(r"{{(\w+)}}", read_parts("report.html"))) == {
        "title",
        "style",
        "script",
        "data",
    }
    with pytest.raises(KeyError, match="style"):
        fill_template("report.html", {"title": "t"})


def test_pages_and_pictures_need_no_torch():
    script = "import sys, fedloom.report_page, fedloom.draw, fedloom.watch; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


# ---- pictures ----


@pytest.mark.parametrize(
    ("suffix", "opening"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
@pytest.mark.parametrize("figure", DRAWN, ids=lambda figure: figure["id"])
def test_every_kind_is_drawn_in_every_format(figure, tmp_path, suffix, opening):
    path = draw(figure, tmp_path / f"figure{suffix}")
    assert path.read_bytes().startswith(opening)


def test_every_kind_of_figure_is_among_them():
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
def test_the_same_figure_is_the_same_file(tmp_path, suffix):
    first, second = (draw(DRAWN[0], tmp_path / f"{k}{suffix}").read_bytes() for k in range(2))
    assert first == second


def test_pictures_say_what_they_show(tmp_path):
    text = draw(DRAWN[1], tmp_path / "points.svg").read_text()
    for words in ("Accuracy against traffic", "test accuracy", "1 MB", "80%", "frontier", "fedtgp"):
        assert f"<!-- {words} -->" in text
    text = draw(DRAWN[2], tmp_path / "time.svg").read_text()
    assert "<!-- 2 min -->" in text


def test_who_sends_nothing_has_a_place_on_a_logarithmic_axis(tmp_path):
    spot = {"name": "local", "color": 0, "x": [0], "y": [0.5]}
    other = {"name": "fedavg", "color": 1, "x": [2e6], "y": [0.7]}
    figure = {**DRAWN[1], "series": [spot, other], "frontier": [[0, 0.5], [2e6, 0.7]]}
    assert "<!-- 0 -->" in draw(figure, tmp_path / "points.svg").read_text()


def test_figures_of_nothing_are_drawn(tmp_path):
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


def test_bad_suffix_and_kind_are_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"must end in .png, .svg, .pdf"):
        draw(DRAWN[0], tmp_path / "figure.gif")
    with pytest.raises(
        ConfigError,
        match=r"unknown kind of figure 'table'.*Valid: bars, graph, heat, image, lines, points, scatter",
    ):
        draw({"kind": "table"}, tmp_path / "figure.png")
