"""The README and docs/: links lead somewhere, every page is on the site, the site builds without a warning and needs no network."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import pytest
from tests.documents import PAGES, ROOT, prose

import fedloom

TEXTS = [*PAGES, "CONTRIBUTING.md"]
needs_mkdocs = pytest.mark.skipif(
    not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))),
    reason="the extra 'docs' is not installed",
)


def anchors(text: str) -> set[str]:
    """Where a page's headings can be reached, as GitHub names them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.M):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    text = prose((ROOT / page).read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.is_file(), f"{page}: {link}: no such file"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page}: {link}: no such heading there"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ *- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    written = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(listed) == sorted(
        [*written, "index.md", "api.md"]
    )  # the two that docs/hooks.py makes


def test_the_readme_links_to_what_it_is_the_door_to():
    links = re.findall(r"\]\((docs/[\w-]+\.md)", (ROOT / "README.md").read_text())
    assert {page for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)} <= set(links)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@needs_mkdocs
def test_site_has_every_page_and_every_public_name(site):
    for page in PAGES:
        name = (
            "index.html"
            if page == "README.md"
            else page.removeprefix("docs/").replace(".md", ".html")
        )
        assert (site / name).is_file(), name
    told = (site / "api.html").read_text()
    for name in fedloom.__all__:
        assert re.search(rf'<h3 id="fedloom\.[\w.]+\.{name}"', told), (
            f"{name} is not on the page of public names"
        )


@needs_mkdocs
def test_site_needs_no_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']([^\"']+)", page.read_text())
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']([^\"']+)", page.read_text())
        assert not [address for address in loaded if address.startswith(("http", "//"))], page.name
