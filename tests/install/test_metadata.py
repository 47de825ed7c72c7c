"""CITATION.cff, the classifiers and docs/install.md agree with pyproject.toml."""

import re

import yaml
from tests.documents import ROOT
from tests.install.requirements import EXTRAS, PROJECT

REQUIRED = {"cff-version", "message", "title", "authors"}
KNOWN = REQUIRED | {"abstract", "keywords", "license", "type", "version"}
PYTHONS = [
    each.rpartition(" ")[2]
    for each in PROJECT["classifiers"]
    if re.match(r"Programming Language :: Python :: 3\.\d", each)
]


def test_the_citation_file_is_valid_and_has_the_version():
    text = (ROOT / "CITATION.cff").read_text()
    cited = yaml.safe_load(text)
    assert REQUIRED <= cited.keys() <= KNOWN
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert str(cited["version"]) == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    assert cited["keywords"] == PROJECT["keywords"]
    assert all(author.keys() <= {"name", "website"} for author in cited["authors"])


def test_supported_versions_of_python():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert [int(each.removeprefix("3.")) for each in PYTHONS] == [11, 12, 13]
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"Python {', '.join(PYTHONS[:-1])} and {PYTHONS[-1]}" in page


def test_install_page_has_every_extra():
    page = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == EXTRAS.keys()
    readme = (ROOT / "README.md").read_text()
    for extra in EXTRAS.keys() - {"dev", "docs"}:
        assert f"`{extra}`" in readme
