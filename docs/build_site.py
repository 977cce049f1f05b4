"""Builds the documentation site of this version, beside those of earlier ones.

python docs/build_site.py build/sites

The folder gets a page that leads to the newest version, and the list that each version's switcher
reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

DOCS = Path(__file__).parent


def build(sites: Path) -> None:
    """Build this version below `sites`. Raises CalledProcessError if Sphinx warns of anything."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    with TemporaryDirectory() as doctrees:
        sphinx = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", doctrees]
        subprocess.run([*sphinx, DOCS, sites / project["version"]], check=True)
    versions = sorted(
        (page.parent.name for page in sites.glob("*/index.html")), key=Version, reverse=True
    )
    (sites / "versions.js").write_text(f"window.VERSIONS = {json.dumps(versions)};\n")
    newest = f"{versions[0]}/index.html"
    (sites / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={newest}">'
        f'<title>unified_ckpt</title><a href="{newest}">unified_ckpt {versions[0]}</a>\n'
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
