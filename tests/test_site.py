"""Builds the documentation site, without a warning, and follows its links."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.long  # needs the extra `docs`

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


class Page(HTMLParser):
    """The ids and links of a page; links to other places than files of the site are left out."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.ids, self.links = path, set[str](), list[tuple[Path, str]]()
        self.sources, self.text = list[str](), path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids.add(values.get("id") or "")
        self.sources += [values["src"] or ""] if "src" in values else []
        link = urlsplit(values.get("href") or "")
        if tag == "a" and not link.scheme:
            file = self.path.parent / link.path if link.path else self.path
            self.links.append((file.resolve(), unquote(link.fragment)))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This version, beside an earlier and two later ones."""
    folder = tmp_path_factory.mktemp("sites")
    for version in ("0.0.9", "0.10.0rc1", "0.10.0"):
        (folder / version).mkdir()
        (folder / version / "index.html").touch()
    subprocess.run([sys.executable, DOCS / "build_site.py", folder], check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def pages(sites: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in (sites / VERSION).rglob("*.html")}


def test_site_has_every_page(sites: Path, pages: dict[Path, Page]) -> None:
    names = [
        path.relative_to(DOCS).with_suffix(".html")
        for suffix in ("md", "ipynb")
        for path in DOCS.rglob(f"*.{suffix}")
    ]
    assert len(names) > 60
    assert {sites / VERSION / name for name in names} - pages.keys() == set()


def test_links_of_the_site_lead_to_sections(pages: dict[Path, Page]) -> None:
    links = [(page, link) for page in pages.values() for link in page.links]
    assert len(links) > 5000
    broken = [
        (page.path.name, *link)
        for page, link in links
        if link[0].suffix == ".html"
        and not (link[0] in pages and (not link[1] or link[1] in pages[link[0]].ids))
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("page", "target", "anchor"),
    [
        ("guide/manager.html", "reference.html", "uc.ManagerOptions.keep_latest"),
        ("guide/manager.html", "reference.html", "uc.CheckpointManager.request_stop"),
        ("guide/convert.html", "reference.html", "uc.ConvertOptions.model_dtype"),
        ("guide/save-and-load.html", "reference.html", "uc.SaveOptions.model_dtype"),
        ("guide/save-and-load.html", "reference.html", "uc.MismatchError"),
        ("guide/report.html", "cli.html", "report"),
        ("index.html", "decisions/index.html", ""),
    ],
)
def test_guide_links_to_the_reference(
    sites: Path, pages: dict[Path, Page], page: str, target: str, anchor: str
) -> None:
    site = sites / VERSION
    assert (site / target, anchor) in pages[site / page].links


def test_versions_are_listed_from_the_newest(sites: Path) -> None:
    listed = (sites / "versions.js").read_text().partition(" = ")[2].rstrip(";\n")
    assert json.loads(listed) == ["0.10.0", "0.10.0rc1", VERSION, "0.0.9"]
    assert 'href="0.10.0/index.html"' in (sites / "index.html").read_text()


def test_page_loads_nothing_from_elsewhere(sites: Path, pages: dict[Path, Page]) -> None:
    """The site works without a network, and the list of versions is above it."""
    page = pages[sites / VERSION / "guide" / "manager.html"]
    assert [source for source in page.sources if urlsplit(source).netloc] == []
    scripts = [(page.path.parent / source.partition("?")[0]).resolve() for source in page.sources]
    assert sites / "versions.js" in scripts
    assert [script for script in scripts if not script.exists()] == []
