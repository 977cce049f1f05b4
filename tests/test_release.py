"""What a release consists of. Those marked `release` hold of a tag only; the release workflow runs
them.
"""

from __future__ import annotations

import email
import os
import re
import tarfile
import tomllib
import zipfile
from contextlib import chdir
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling import build
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"unified_ckpt-{PROJECT['version']}"
SOURCE = PROJECT["urls"]["Source"]
PLACEHOLDER = re.compile(r"https://[\w.]*/?OWNER\b")
META = (".toml", ".md", ".yml", ".cff", ".py")
FOLDERS = (".github", "benchmarks", "docs", "tests", "unified_ckpt")
FORM_FIELDS = {"checkboxes", "dropdown", "input", "markdown", "textarea"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], Message]:
    """The names in the sdist and in the wheel, and the wheel's metadata."""
    folder = tmp_path_factory.mktemp("dist")
    with chdir(ROOT):
        sdist, wheel = build.build_sdist(str(folder)), build.build_wheel(str(folder))
    with tarfile.open(folder / sdist) as archive:
        in_sdist = [name.removeprefix(f"{NAME}/") for name in archive.getnames()]
    with zipfile.ZipFile(folder / wheel) as archive_of_wheel:
        metadata = email.message_from_bytes(archive_of_wheel.read(f"{NAME}.dist-info/METADATA"))
        return in_sdist, archive_of_wheel.namelist(), metadata


def package_files() -> list[str]:
    paths = (ROOT / "unified_ckpt").rglob("*")
    named = [path.relative_to(ROOT) for path in paths if path.is_file()]
    return sorted(str(path) for path in named if "__pycache__" not in path.parts)


def placeholders() -> set[str]:
    """The files with an address that somebody has to claim first."""
    paths = [*ROOT.glob("*"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*"))]
    texts = [path for path in paths if path.suffix in META and path.is_file()]
    return {
        str(path.relative_to(ROOT)) for path in texts if PLACEHOLDER.search(path.read_text("utf-8"))
    }


def release_notes() -> list[str]:
    """The versions of the changelog with their dates, newest first."""
    return re.findall(r"^## (.*)$", (ROOT / "docs" / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_wheel_and_sdist_have_the_whole_package(
    files: tuple[list[str], list[str], Message],
) -> None:
    """The wheel has nothing else. The sdist has no tests: they need a clone."""
    in_sdist, in_wheel, _ = files
    info = f"{NAME}.dist-info/"
    assert sorted(name for name in in_wheel if not name.startswith(info)) == package_files()
    assert f"{info}licenses/LICENSE" in in_wheel
    assert sorted(name for name in in_sdist if name.startswith("unified_ckpt/")) == package_files()
    assert {name.partition("/")[0] for name in in_sdist} == {
        ".gitignore",  # hatchling adds it
        "CITATION.cff",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "SECURITY.md",
        "docs",
        "hatch_build.py",
        "pyproject.toml",
        "unified_ckpt",
    }


def test_long_description_links_to_files_of_its_version(
    files: tuple[list[str], list[str], Message],
) -> None:
    text = files[2].get_payload()
    assert isinstance(text, str)
    targets = re.findall(r'(?:\]\(|\bsrc(?:set)?=")([^)\s"]+)', text)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    ours = re.escape(f"{SOURCE}/") + rf"(blob|raw)/v{re.escape(PROJECT['version'])}/([^#]+)"
    matches = list(filter(None, (re.match(ours, target) for target in targets)))
    assert {kind for kind, _ in (match.groups() for match in matches)} == {"blob", "raw"}
    assert [match[2] for match in matches if not (ROOT / match[2]).exists()] == []
    images = [target for target in targets if target.endswith((".svg", ".png"))]
    assert images
    assert [image for image in images if "/raw/" not in image] == []


def test_metadata_is_complete(files: tuple[list[str], list[str], Message]) -> None:
    metadata = files[2]
    assert set(metadata.get_all("Classifier", [])) <= classifiers
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"]
    assert metadata["Maintainer"]
    labels = [url.partition(",")[0] for url in metadata.get_all("Project-URL", [])]
    assert labels == ["Homepage", "Documentation", "Source", "Issues", "Changelog"]
    minor = int(metadata["Requires-Python"].removeprefix(">=3."))
    pythons = [
        int(line.rpartition(".")[2])
        for line in metadata.get_all("Classifier", [])
        if re.search(r":: 3\.\d+$", line)
    ]
    assert pythons[0] == minor
    assert pythons == sorted(pythons)


def test_addresses_are_placeholders_in_one_file() -> None:
    assert placeholders() <= {"pyproject.toml"}
    urls = PROJECT["urls"].values()
    assert len({bool(PLACEHOLDER.match(url)) for url in urls}) == 1, "some are real, others not"


def test_version_is_in_pyproject_and_in_the_changelog() -> None:
    assert re.match(rf"\[{re.escape(PROJECT['version'])}\] - ", release_notes()[0])
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_workflow_publishes_what_it_has_tested() -> None:
    """Trusted publishing: the only job with an identity downloads what was built and tested."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    trusted = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert trusted == ["publish"]
    (download, upload) = jobs["publish"]["steps"]
    assert download["uses"].startswith("actions/download-artifact@")
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert upload["with"] == {"attestations": True}
    assert jobs["publish"]["environment"]
    assert jobs["publish"]["needs"] == "install"
    assert jobs["install"]["needs"] == "build"


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")))
def test_issue_form_is_one_that_the_host_shows(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        assert content == {"blank_issues_enabled": False}
        return
    assert content.keys() >= {"name", "description", "body"}
    assert {field["type"] for field in content["body"]} <= FORM_FIELDS
    names = [field["id"] for field in content["body"] if field["type"] != "markdown"]
    assert len(names) == len(set(names))
    assert all(
        field["attributes"].get("label") for field in content["body"] if field["type"] != "markdown"
    )


@pytest.mark.release
def test_release_has_no_placeholders() -> None:
    assert placeholders() == set(), "claim the name and the repository, and write their addresses"


@pytest.mark.release
def test_release_is_installed_by_name() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"pip install {PROJECT['name']}" in readme, "the README installs from a clone"


@pytest.mark.release
def test_release_is_dated_and_tagged() -> None:
    assert re.fullmatch(r"\[\S+\] - \d{4}-\d\d-\d\d", release_notes()[0])
    assert os.environ["GITHUB_REF_NAME"] == f"v{PROJECT['version']}"
