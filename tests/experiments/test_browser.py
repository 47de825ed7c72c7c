"""The pages in a real browser: they load only themselves, have no errors, and can be used."""

import base64
import json
import threading

import pytest
from tests import chromium, pages
from tests.experiments.test_grid import nothing, toy
from tests.experiments.test_watch import CONFIG, line, write

from fedloom.experiments.executor import Processes, execute
from fedloom.experiments.grid import cells
from fedloom.experiments.report.comparison import compare
from fedloom.experiments.report.html import write_page
from fedloom.experiments.report.watch import Watch
from fedloom.experiments.report.write import write_report
from fedloom.experiments.run_folder import gather

pytestmark = pytest.mark.slow
SECTIONS = ("results", "classes", "clients", "cost", "settings", "data", "pictures")


@pytest.fixture(scope="module")
def new_tab():
    with chromium.browser() as opener:
        yield opener


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(pages.every_kind(), path)
    return path.as_uri()


@pytest.fixture
def tab(new_tab, report):
    """A tab with the report, 1400 pixels wide, on a light system.

    After the test its console must be empty, and it must have requested only the report.
    """
    tab = new_tab()
    tab.size(1400)
    tab.open(report)
    tab.js("localStorage.clear()")
    yield tab
    tab.settle()
    assert tab.problems == []
    assert {address.partition("#")[0] for address in tab.requests} <= {report, "about:blank"}


def column(tab, selector, number):
    """Returns the texts of a table's column, from top to bottom."""
    rows = f"[...document.querySelectorAll('{selector} tbody tr')]"
    return tab.js(f"{rows}.map((row) => row.children[{number}].textContent)")


def chosen(tab):
    """Returns the selected tab and the visible panels."""
    shown = (
        "[...document.querySelectorAll('[role=tabpanel]:not([hidden])')].map((panel) => panel.id)"
    )
    return tab.js("document.querySelector('[role=tab][aria-selected=true]').textContent"), tab.js(
        shown
    )


def colours(tab, selector):
    """Returns the number of different colours on a canvas."""
    script = """(() => {
      const canvas = document.querySelector(%s), context = canvas.getContext("2d");
      const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
      return new Set(new Uint32Array(pixels.buffer)).size;
    })()"""
    return tab.js(script % json.dumps(selector))


# ---- the report ----


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_every_section_opens_and_fits(tab, report, width, dark, tmp_path):
    tab.size(width, 900, dark)
    for section in SECTIONS:
        tab.open("about:blank")
        tab.open(f"{report}#{section}")
        assert chosen(tab) == (section.title(), [f"panel-{section}"])
        assert tab.js("document.documentElement.scrollWidth") <= width
        plots = "[...document.querySelectorAll('.panel:not([hidden]) .plot')]"
        drawn = tab.js(f"{plots}.map((p) => p.querySelectorAll('svg *').length)")
        assert all(count > 5 for count in drawn)
        tab.screenshot(tmp_path / "shot.png")
        assert (tmp_path / "shot.png").read_bytes()[:4] == b"\x89PNG"


def test_only_figures_with_many_marks_use_a_canvas(tab):
    tab.click("#tab-pictures")
    assert colours(tab, "#embeddings canvas") > 20
    assert colours(tab, "#adjacency canvas") > 20
    assert tab.js("document.querySelector('#graph canvas')") is None
    tab.click("#tab-results")
    assert tab.js("document.querySelector('#convergence canvas')") is None


def test_figures_are_drawn_when_their_tab_is_opened(tab):
    assert tab.js("document.querySelectorAll('#panel-cost figure').length") == 0
    tab.click("#tab-cost")
    assert chosen(tab) == ("Cost", ["panel-cost"])
    assert tab.js("document.querySelectorAll('#phases svg path').length") > 30
    assert tab.js("location.hash") == "#cost"


def test_arrow_keys_change_the_tab(tab):
    tab.js("document.getElementById('tab-results').focus()")
    for key, title in (
        ("ArrowRight", "Classes"),
        ("ArrowLeft", "Results"),
        ("ArrowLeft", "Pictures"),
        ("Home", "Results"),
        ("End", "Pictures"),
    ):
        tab.press(key)
        assert chosen(tab) == (title, [f"panel-{title.lower()}"])
        assert tab.js("document.activeElement.textContent") == title
    tabs = "[...document.querySelectorAll('[role=tab]')]"
    assert tab.js(f"{tabs}.filter((tab) => tab.tabIndex === 0).length") == 1


def test_a_link_to_a_figure_opens_its_tab(tab, report):
    tab.open("about:blank")
    tab.open(f"{report}#homophily")
    assert chosen(tab)[0] == "Data"


def test_tables_are_sorted_with_mouse_and_keyboard(tab):
    head = "#results-table th:nth-child(4)"
    tab.click(f"{head} button")
    first = [row[3]["sort"] for row in pages.every_kind()["figures"][0]["rows"]]
    # The order is that of the numbers, not of the texts: 1000.00 MB is more than 90.00 MB.
    expected = [f"{sent / 1e6:.2f} MB" for sent in sorted(first, reverse=True)]
    assert column(tab, "#results-table", 3) == expected
    assert tab.js(f"document.querySelector('{head}').ariaSort") == "descending"
    tab.js(f"document.querySelector('{head} button').focus()")
    tab.press("Enter")
    assert column(tab, "#results-table", 3) == expected[::-1]
    assert tab.js(f"document.querySelector('{head}').ariaSort") == "ascending"
    for _ in range(2):
        tab.click("#results-table th:nth-child(5) button")
        assert column(tab, "#results-table", 4)[-1] == "–"  # unknown values are last in both orders
    tab.click("#results-table th:first-child button")
    assert column(tab, "#results-table", 0) == sorted(pages.METHODS)
    sorted_by = "#results-table [aria-sort]:not([aria-sort=none])"
    assert tab.js(f"document.querySelectorAll('{sorted_by}').length") == 1


def test_the_best_is_bold_and_the_second_underlined(tab):
    assert tab.js("document.querySelector('#results-table strong').textContent").startswith("76.0")
    assert tab.js("document.querySelector('#results-table u').textContent").startswith("75.0")


def test_the_theme_follows_the_system_and_a_button_overrides_it(tab, report):
    page = "getComputedStyle(document.body).backgroundColor"
    light = tab.js(page)
    tab.size(1400, dark=True)
    dark = tab.js(page)
    assert light != dark
    tab.click("#theme")
    assert tab.js(page) == light
    tab.open("about:blank")
    tab.open(report)
    assert tab.js(page) == light  # remembered, although the system is dark
    tab.click("#theme")
    assert tab.js(page) == dark
    assert tab.js("document.getElementById('theme').textContent") == "Light"


def test_canvases_follow_the_theme(tab):
    tab.click("#tab-pictures")
    before = tab.js("document.querySelector('#adjacency canvas').toDataURL()")
    tab.click("#theme")
    assert tab.js("document.querySelector('#adjacency canvas').toDataURL()") != before


@pytest.mark.parametrize(
    ("section", "figure", "at", "words"),
    [
        ("results", "convergence", (0.5, 0.5), ["round 1", "fedavg", "%"]),
        ("cost", "phases", (0.15, 0.17), ["fedavg", "total", "MB"]),
        ("classes", "confusion-fedavg", (0.5, 0.3), ["true class", "%", " of "]),
        ("data", "labels", (0.5, 0.3), ["client", "class"]),
        ("pictures", "adjacency", (0.1, 0.2), ["before pruning", "client 0", "of the maximum"]),
    ],
)
def test_the_pointer_shows_a_tooltip_with_values(tab, section, figure, at, words):
    tab.click(f"#tab-{section}")
    left, top, width, height = tab.box(f"#{figure} .plot")
    assert tab.js(f"document.querySelector('#{figure} .tip').hidden")
    tab.move(left + at[0] * width, top + at[1] * height)
    text = tab.js(f"document.querySelector('#{figure} .tip').innerText")
    assert all(word in text for word in words), text
    place = tab.js(f"document.querySelector('#{figure} .tip').getBoundingClientRect().toJSON()")
    assert left - 1 <= place["left"]
    assert place["right"] <= left + width + 1
    tab.move(2, 2)
    assert tab.js(f"document.querySelector('#{figure} .tip').hidden")


@pytest.mark.parametrize(
    ("section", "figure"),
    [
        ("results", "accuracy-traffic"),
        ("clients", "who-gains"),
        ("pictures", "graph"),
        ("pictures", "embeddings"),
    ],
)
def test_arrow_keys_show_one_value_after_another(tab, section, figure):
    tab.click(f"#tab-{section}")
    tab.js(f"document.querySelector('#{figure} .plot').focus()")
    seen = []
    for _ in range(3):
        tab.press("ArrowRight")
        seen.append(tab.js(f"document.querySelector('#{figure} .tip').innerText"))
    assert len(set(seen)) == 3
    tab.press("Escape")
    assert tab.js(f"document.querySelector('#{figure} .tip').hidden")


def test_legend_entries_hide_and_show_a_series(tab):
    button = "#convergence .legend button:nth-of-type(2)"
    drawn = "document.querySelectorAll('#convergence .plot > svg path').length"
    before = tab.js(drawn)
    tab.click(button)
    assert tab.js(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    assert tab.js(drawn) < before
    left, top, width, height = tab.box("#convergence .plot")
    tab.move(left + width / 2, top + height / 2)
    assert "fedavg" not in tab.js("document.querySelector('#convergence .tip').innerText")
    tab.js(f"document.querySelector('{button}').focus()")
    tab.press(" ")
    assert tab.js(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "true"
    assert tab.js(drawn) == before


def test_methods_that_send_nothing_are_at_zero(tab):
    texts = "[...document.querySelectorAll('#accuracy-traffic .plot text')]"
    assert "0" in tab.js(f"{texts}.map((text) => text.textContent)")
    tab.js("document.querySelector('#accuracy-traffic .plot').focus()")
    tab.press("ArrowRight")
    assert "local" in tab.js("document.querySelector('#accuracy-traffic .tip').innerText")


def test_embeddings_can_be_coloured_by_client(tab):
    tab.click("#tab-pictures")
    buttons = "[...document.querySelectorAll('#embeddings .legend [aria-pressed]')]"
    names = f"{buttons}.map((button) => button.textContent)"
    assert tab.js(names) == list(pages.CLASSES)
    tab.click("#embeddings .switch")
    assert tab.js(names) == [f"client {k}" for k in range(4)]


@pytest.mark.parametrize(
    ("section", "figure", "rows"),
    [
        ("results", "convergence", 50),
        ("cost", "phases", 10),
        ("data", "labels", 10),
        ("pictures", "graph", 50),
    ],
)
def test_figures_show_their_numbers_as_a_table(tab, section, figure, rows):
    tab.click(f"#tab-{section}")
    assert tab.js(f"document.querySelector('#{figure} details .table')") is None
    tab.click(f"#{figure} details summary")
    assert len(column(tab, f"#{figure} details", 0)) == rows
    total = tab.js(f"document.querySelector('#{figure} details .count').textContent")
    assert tab.js(f"document.querySelector('#{figure} details .tools').hidden") == (rows < 50)
    assert total.startswith("1–")


def test_folders_that_were_left_out_are_listed(tab):
    text = tab.js("document.getElementById('left-out').innerText")
    assert "2 run folders are not in this report" in text
    assert "runs/<b>old</b> was made by another version" in text  # as text, not as an element
    assert tab.js("document.querySelector('#left-out b')") is None


def test_figures_are_redrawn_when_the_window_changes_its_size(tab):
    before = tab.js("document.querySelector('#convergence svg').getAttribute('width')")
    tab.size(700)
    tab.settle()
    assert tab.js("document.querySelector('#convergence svg').getAttribute('width')") != before


@pytest.mark.parametrize(
    ("selector", "condition"),
    [
        (".plot", "one.getAttribute('role') === 'img' && one.ariaLabel.length > 20"),
        ("figure", "one.querySelector('h3, h4').textContent"),
        ("button", "one.textContent || one.ariaLabel"),
    ],
)
def test_elements_have_names_and_roles(tab, selector, condition):
    assert tab.js(f"[...document.querySelectorAll('{selector}')].every((one) => {condition})")


def test_a_printed_page_shows_all_sections(tab):
    pdf = base64.b64decode(tab.send("Page.printToPDF")["data"])
    assert pdf[:4] == b"%PDF"
    assert chosen(tab) == ("Results", ["panel-results"])  # as before printing
    assert tab.js("document.querySelectorAll('#embeddings canvas').length") == 1


def test_a_page_without_figures_says_so(new_tab, tmp_path):
    write_page(pages.page([]), tmp_path / "report.html")
    tab = new_tab()
    tab.open((tmp_path / "report.html").as_uri())
    assert "no run folder could be used" in tab.js("document.body.innerText")
    assert tab.problems == []


def test_a_large_report_opens(new_tab, tmp_path):
    write_page(pages.large(), tmp_path / "report.html")
    tab = new_tab()
    tab.size(1400)
    tab.open((tmp_path / "report.html").as_uri())
    assert tab.js("document.querySelectorAll('#convergence svg path').length") > 20
    assert colours(tab, "#who-gains canvas") > 20
    tab.click("#tab-clients")
    assert len(column(tab, "#clients-table", 0)) == 50
    tab.click("#clients-table th:nth-child(3) button")
    best = max(row[2]["sort"] for row in pages.large()["figures"][3]["rows"])
    assert column(tab, "#clients-table", 2)[0] == f"{100 * best:.1f}"
    tab.click("#clients-table .pager button:last-child")
    assert (
        tab.js("document.querySelector('#clients-table .count').textContent") == "51–100 of 10,000"
    )
    tab.click("#clients-table input")
    tab.send("Input.insertText", text="fedgh 77")
    tab.settle()
    assert set(column(tab, "#clients-table", 0)) == {"fedgh"}
    assert "77" in column(tab, "#clients-table", 1)
    tab.click("#tab-data")
    assert colours(tab, "#labels canvas") > 20
    assert tab.problems == []


# ---- the report of real runs ----


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The report of local, central and fedavg on a small graph, with three seeds each."""
    out = tmp_path_factory.mktemp("real")
    tables = toy("fedavg,central", method={"rounds": 4})
    tables["compare"]["seeds"] = 3
    assert not execute(cells(tables, out), Processes(2), nothing).failed
    return write_report(compare(*gather([out])), out / "report.html", "fedloom report").as_uri()


def test_the_report_begins_with_the_headline_and_ends_with_the_versions(new_tab, real):
    tab = new_tab()
    tab.size(1400)
    tab.open(real)
    order = "[...document.querySelectorAll('#headline, [role=tablist], table, svg, #versions')]"
    found = tab.js(f"{order}.map((one) => one.id || one.role || one.tagName)")
    assert found[:3] == ["headline", "tablist", "TABLE"]
    assert found[-1] == "versions"
    text = tab.js("document.getElementById('headline').textContent")
    assert "accuracy" in text
    assert "Local" in text
    assert "torch" in tab.js("document.getElementById('versions').innerText")
    sorted_by = "document.querySelector('table [aria-sort=descending]').textContent"
    assert tab.js(sorted_by) == "accuracy %"
    scores = [float(text.split()[0]) for text in column(tab, ".table-figure", 1)]
    assert scores == sorted(scores, reverse=True)
    assert tab.problems == []


@pytest.mark.parametrize("width", [1400, 390])
def test_axes_have_labels_and_pages_do_not_scroll_sideways(new_tab, real, width):
    tab = new_tab()
    tab.size(width)
    for section in ("results", "classes", "clients", "cost", "settings", "data", "runs"):
        tab.open("about:blank")
        tab.open(f"{real}#{section}")
        assert tab.js("document.documentElement.scrollWidth") <= width
        for kind, labels in (("lines", 2), ("points", 2), ("bars", 1), ("heat", 2)):
            plots = f"[...document.querySelectorAll('figure.{kind} .plot')]"
            named = tab.js(f"{plots}.map((p) => p.querySelectorAll('text.name').length)")
            assert all(count == labels for count in named), (section, kind, named)
        # No label of an axis lies outside of its plot.
        outside = """[...document.querySelectorAll('.panel:not([hidden]) .plot')].flatMap(plot => {
          const box = plot.getBoundingClientRect();
          return [...plot.querySelectorAll('text')].filter((text) => {
            const { left, right } = text.getBoundingClientRect();
            return left < box.left - 4 || right > box.right + 4;
          }).map((text) => text.textContent);
        })"""
        assert tab.js(outside) == []


@pytest.mark.parametrize("width", [1400, 390])
def test_equal_axes_are_equal(new_tab, real, width):
    tab = new_tab()
    tab.size(width)
    tab.open(f"{real}#clients")
    path = "document.querySelector('.points path.diagonal').getBoundingClientRect().toJSON()"
    line = tab.js(path)
    assert line["width"] == pytest.approx(line["height"], abs=1.5)
    ticks = """[...document.querySelectorAll('.points .plot text:not(.name)')].map((text) => {
      const { left, top } = text.getBoundingClientRect();
      return [text.textContent, text.getAttribute('text-anchor'), left, top];
    })"""
    found = tab.js(ticks)
    rows = {text: top for text, anchor, _, top in found if anchor == "end"}
    across = {text: left for text, anchor, left, _ in found if anchor == "middle"}
    both = sorted(rows.keys() & across.keys(), key=lambda text: across[text])
    assert len(both) >= 2
    first, last = both[0], both[-1]
    assert across[last] - across[first] == pytest.approx(rows[first] - rows[last], abs=6)


def test_wide_tables_say_that_they_scroll(new_tab, real):
    tab = new_tab()
    tab.size(390)
    tab.open(real)
    hint = "getComputedStyle(document.querySelector('.table .hint')).display"
    outer = "document.querySelector('.table .more-to-see').className"
    shadow = "getComputedStyle(document.querySelector('.table .more-to-see'), '::after').opacity"
    assert tab.js(hint) == "block"
    assert "more-right" in tab.js(outer)
    tab.wait(f"{shadow} === '1'")
    tab.js("document.querySelector('.table .scroll').scrollTo(9999, 0)")
    tab.wait(f"!{outer}.includes('more-right') && {outer}.includes('more-left')")
    tab.size(1400)
    tab.settle()
    assert tab.js(hint) == "none"


def test_captions_are_not_repeated(new_tab, real):
    tab = new_tab()
    tab.size(1400)
    for section in ("results", "classes", "clients", "cost", "data"):
        tab.open("about:blank")
        tab.open(f"{real}#{section}")
        texts = tab.js(
            "[...document.querySelectorAll('.panel:not([hidden]) :is(figcaption p, .caption)')]"
            ".map((one) => one.textContent).filter(Boolean)"
        )
        distinct = [text for text in texts if "predictions are right" not in text]
        assert len(set(distinct)) == len(distinct)


CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const parse = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color[3] > 250) return color;
    }
    return [255, 255, 255, 255];
  };
  const cell = (text) => {  // the cell of a heat map that the text lies on
    const { left, top, width, height } = text.getBoundingClientRect();
    const x = left + width / 2, y = top + height / 2;
    return [...text.closest('svg').querySelectorAll('path')].filter((path) => {
      const box = path.getBoundingClientRect();
      return box.left <= x && box.right >= x && box.top <= y && box.bottom >= y &&
        path.style.fill && path.style.fill !== 'none';
    }).map((path) => parse(getComputedStyle(path).fill))[0];
  };
  const low = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.getClientRects().length || node.disabled || node.closest('.tip')) continue;
    const style = getComputedStyle(node), inSvg = node instanceof SVGElement;
    const ink = parse(inSvg ? style.fill : style.color);
    const ground = node.classList.contains('cell') ? cell(node) : behind(node);
    if (!ground) { low.push(['no ground', node.textContent]); continue; }
    const [a, b] = [light(ink), light(ground)].sort((p, q) => q - p);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([ratio.toFixed(2), node.tagName, node.textContent.slice(0, 40)]);
  }
  return low;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(new_tab, real, dark):
    tab = new_tab()
    tab.size(1400, 900, dark)
    for section in ("results", "classes", "clients", "cost", "settings", "data", "runs"):
        tab.open("about:blank")
        tab.open(f"{real}#{section}")
        assert tab.js(CONTRAST) == [], section


# ---- the watch page ----


@pytest.fixture
def watched(tmp_path):
    """A server that watches a folder that does not exist yet."""
    with Watch(tmp_path / "run") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def words(name):
    return f"document.querySelector('.state')?.innerText.includes({json.dumps(name)})"


def test_a_run_is_followed_while_it_grows(new_tab, watched):
    tab, folder = new_tab(), watched.folder
    tab.size(390, dark=True)
    tab.open(watched.url)
    tab.wait(words("Waiting"))
    assert "token" not in tab.js("location.href")
    write(folder, line(1))
    tab.wait(words("round 1 of 4"))
    write(
        folder,
        line(2, absent=[{"client": "bob", "phase": "train", "cause": "did <i>not</i> answer"}]),
        line(3),
    )
    tab.wait(words("round 3 of 4"))
    best = "Best so far at round 1: 10.0\u202f% test accuracy, 20.0\u202f% validation accuracy."
    assert tab.js("document.querySelector('.lead').textContent") == best
    assert tab.js("document.querySelectorAll('#accuracy svg path').length") > 4
    rows = "[...document.querySelectorAll('#client-table tbody tr')]"
    texts = f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))"
    assert tab.js(texts) == [
        ["ann", "10.0\u202f%", "–", "0", "", ""],  # the validation accuracy is best in round 1
        ["bob", "20.0\u202f%", "–", "1", "2", "did <i>not</i> answer"],
    ]
    assert tab.js("document.documentElement.scrollWidth") <= 390
    sent = [address for address in tab.requests if "/data" in address]
    assert any("from=1" in address for address in sent)  # only new entries are requested
    write(folder, line(4))
    (folder / "summary.json").write_text(
        json.dumps(
            {"status": "failed", "cause": "RoundFailed: 1 of 2 clients answered", "config": CONFIG}
        )
    )
    tab.wait(words("Failed"))
    assert "1 of 2 clients answered" in tab.js("document.querySelector('.cause').textContent")
    assert tab.problems == []
    home = watched.url.partition("?")[0]
    assert all(address.startswith(home) for address in tab.requests)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_loss_and_the_selection_metric_are_drawn(new_tab, watched, dark):
    config = CONFIG | {"run": {"seed": 0, "selection": "pr_auc"}}
    more = [{"loss": 1 / k, "pr_auc": 0.1 * k, "val_pr_auc": 0.2 * k} for k in (1, 2)]
    write(watched.folder, line(1, **more[0]), line(2, **more[1]), config=config)
    tab = new_tab()
    tab.size(1400, 900, dark)
    tab.open(watched.url)
    tab.wait("document.querySelectorAll('#loss svg path').length > 4")
    titles = tab.js("[...document.querySelectorAll('figure h3')].map((one) => one.textContent)")
    assert titles[:3] == ["PR-AUC by round", "Accuracy by round", "Training loss by round"]
    lead = tab.js("document.querySelector('.lead').textContent")
    assert lead.startswith("Best so far at round 2: 20.0\u202f% test PR-AUC, 40.0\u202f% val")
    assert tab.js(CONTRAST) == []
    tab.size(390)
    tab.settle()
    assert tab.js("document.documentElement.scrollWidth") <= 390
    assert tab.problems == []


def test_updates_that_stand_out_are_listed_while_the_run_grows(new_tab, watched):
    name = "<img src=x onerror=alert(1)>"

    def updates(norm, clipped):
        clients = {"ann": [1.0, 0.9], name: [norm, -0.5]}
        return [{"phase": "train", "clients": clients, "clipped": clipped, "left_out": []}]

    tab = new_tab()
    tab.size(390)
    write(watched.folder, line(1, epsilon=0.25))
    tab.open(watched.url)
    tab.wait("!!document.querySelector('#client-table tbody tr')")
    assert tab.js("document.querySelector('#outliers') === null")
    assert "ε spent0.250" in tab.js("document.querySelector('.facts').textContent")
    write(watched.folder, line(2, updates=updates(9.0, [name]), epsilon=0.5))
    tab.wait("!!document.querySelector('#outliers tbody tr')")
    cells = "[...document.querySelectorAll('#outliers tbody td, #outliers tbody th')]"
    texts = f"{cells}.map((cell) => cell.textContent)"
    assert tab.js(texts) == [name, "train", "9.00", "-0.50", "shortened"]
    assert tab.js("document.querySelectorAll('#outliers img').length") == 0
    write(watched.folder, line(3, updates=updates(1.0, [])))
    text = "document.querySelector('#outliers p').textContent"
    tab.wait(f"{text} === 'Round 3: 1 of 2 updates.'")
    assert tab.js(texts)[2:] == ["1.00", "-0.50", ""]
    assert tab.js("document.documentElement.scrollWidth") <= 390
    assert tab.problems == []


def test_the_page_says_that_the_watch_has_ended(new_tab, tmp_path):
    write(tmp_path / "run", line(1))
    tab = new_tab()
    with Watch(tmp_path / "run") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        tab.open(server.url)
        tab.wait(words("round 1"))
        server.shutdown()
        thread.join()
    tab.wait(
        "document.querySelector('.notice:not([hidden])')?.innerText.includes('does not answer')"
    )


def test_several_runs_are_listed_and_can_be_opened(new_tab, watched):
    for name in ("a", "b & c"):
        write(watched.folder / "runs" / name, line(1))
    tab = new_tab()
    tab.open(watched.url)
    tab.wait("document.querySelectorAll('tbody tr').length === 2")
    write(watched.folder / "runs" / "a", line(2))
    tab.wait("document.querySelector('tbody').innerText.includes('2 of 4')")
    tab.click("tbody tr:nth-child(2) a")
    tab.wait("document.querySelector('h1').textContent === 'b & c'")
    tab.wait(words("round 1 of 4"))
    tab.click(".back a")
    tab.wait("document.querySelector('h1').textContent === 'Runs'")
    assert tab.problems == []
