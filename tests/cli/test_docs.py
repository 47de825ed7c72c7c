"""The README and docs/: links, navigation, generated parts, and a site that needs no network."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from importlib.util import find_spec

import pytest
from tests.documents import PAGES, ROOT, prose

import fedloom
import fedloom.api
from fedloom.core.phase import phases_of
from fedloom.core.registry import method_class, method_names
from fedloom.data.partition import partitions

TEXTS = [*PAGES, "CONTRIBUTING.md"]
needs_mkdocs = pytest.mark.skipif(
    not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))),
    reason="the extra 'docs' is not installed",
)


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub names them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.M):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", TEXTS)
def test_links_have_targets(page):
    text = prose((ROOT / page).read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.is_file(), f"{page}: {link}: no such file"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: {link}: no such heading there"


def test_every_attack_of_the_security_page_has_its_test():
    text, last, named = (ROOT / "docs" / "security.md").read_text(), "", 0
    for path, test in re.findall(r"`((?:\w+/)?test_\w+\.py)?(?:::(\w+))?`", text):
        last = path or last
        if not path and not test:
            continue
        source = ROOT / "tests" / last
        assert source.is_file(), last
        if test:
            assert f"def {test}(" in source.read_text(), f"{last}::{test}"
        named += 1
    assert named > 40


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "docs/benchmarks.md"])
def test_prose_has_at_most_100_columns(page):
    text = (ROOT / page).read_text()
    written = re.sub(r"<!-- (\w[\w-]*) -->.*?<!-- /\1 -->", "", text, flags=re.S)  # not by bench/
    for line in prose(written).splitlines():
        assert len(line) <= 100 or line.startswith("|"), f"{page}: {line[:60]}..."


@pytest.mark.parametrize("page", TEXTS)
def test_pages_refer_to_nothing_outside_the_repository(page):
    found = re.findall(
        r"(?<!_)shared/|requirements? of the project|project's requirements",
        (ROOT / page).read_text(),
    )
    assert not found


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ *- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    written = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(listed) == sorted([*written, "index.md", "contributing.md"])


def test_readme_is_short_and_links_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    links = set(re.findall(r"\]\((docs/[\w-]+\.md)", text))
    assert {page for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)} <= links


def test_numbers_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert f"| methods | {len(method_names())}, " in text
    assert f"{len(fedloom.catalogue())} datasets" in text
    assert f"{len(partitions())} partitions" in text


def test_contributing_and_design_have_the_same_map():
    def packages(page):
        return re.findall(r"^\| `(\w+)` \| (.+\.) \|$", (ROOT / page).read_text(), re.M)

    assert packages("docs/design.md") == packages("CONTRIBUTING.md")
    assert len(packages("CONTRIBUTING.md")) == 8


# ---- what docs/hooks.py generates ----
@pytest.fixture(scope="module")
def hooks():
    """docs/hooks.py as a module."""
    spec = importlib.util.spec_from_file_location("fedloom_docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_mkdocs
def test_generated_parts_have_a_generator(hooks):
    wanted = {
        name
        for page in PAGES
        for name in re.findall(r"<!-- generated: (\S+) -->", (ROOT / page).read_text())
    }
    assert wanted == set(hooks.GENERATED)


@needs_mkdocs
def test_method_page_has_docstring_settings_and_phases(hooks):
    for name in method_names():
        page, cls = hooks.method_page(name), method_class(name)
        assert re.match(r"# \S.*\n\n\S", page)
        for key in (*(f.name for f in fields(cls)), *phases_of(cls)):
            assert f"| `{key}` |" in page


@needs_mkdocs
def test_docstrings_become_markdown(hooks):
    text = "It sends a*b and `a*b`:\n    up  x\n    down  y\nand <c>.\n\n    θ_k ← θ\n"
    lines = [line for line in hooks._docstring(text) if line]
    block = ["```text", "up  x", "down  y", "```"]
    assert lines == [
        "It sends a\\*b and `a*b`:", *block, "and \\<c>.", "```text", "θ_k ← θ", "```",
    ]  # fmt: skip


@needs_mkdocs
def test_command_reference_has_every_option(hooks):
    text = hooks.commands()
    for option in ("--baselines", "--methods", "--party", "--json"):
        assert f"`{option}`" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.mark.slow
@needs_mkdocs
def test_site_has_every_page_and_every_public_name(site):
    names = [page.removeprefix("docs/") for page in PAGES if page != "README.md"]
    names += ["index.md", *(f"methods/{module}.md" for module in method_names().values())]
    for name in names:
        assert (site / name.replace(".md", ".html")).is_file(), name
    for page, public in (("api", fedloom.__all__), ("extension-api", fedloom.api.__all__)):
        shown = (site / f"{page}.html").read_text()
        for name in public:
            value = getattr(fedloom.api if page == "extension-api" else fedloom, name)
            if callable(value) and getattr(value, "__module__", "").startswith("fedloom"):
                assert re.search(rf'<h3 id="fedloom\.[\w.]+\.{name}"', shown), f"{name}: {page}"
    for method in ("ask", "mean", "relay", "rounds"):
        assert (
            f'id="fedloom.core.server.Server.{method}"' in (site / "extension-api.html").read_text()
        )


@pytest.mark.slow
@needs_mkdocs
def test_site_lists_methods_with_secure_sums(site):
    shown = (site / "secure-sums.html").read_text()
    assert "<code>fedavg</code>" in shown.partition("These methods run")[2].partition("</p>")[0]
    assert re.search(r"<td><code>scaffold</code></td>\s*<td><code>train</code></td>", shown)


@pytest.mark.slow
@needs_mkdocs
def test_site_needs_no_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']([^\"']+)", page.read_text())
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']([^\"']+)", page.read_text())
        assert not [address for address in loaded if address.startswith(("http", "//"))], page.name
