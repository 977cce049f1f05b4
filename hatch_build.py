"""Writes the package's long description: README.md with absolute links, for package indexes.

Links lead to the files of the version that is built, in the repository that `Source` of
`[project.urls]` names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(\]\()(?!https?://|#)([^)\s]+)")
IMAGE = re.compile(r'(\bsrc(?:set)?=")(?!https?://)([^"]+)')


class LongDescription(MetadataHookInterface):
    """Sets `readme` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Rewrite the links of README.md."""
        source, tag = metadata["urls"]["Source"], f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = LINK.sub(rf"\g<1>{source}/blob/{tag}/\g<2>", text)
        text = IMAGE.sub(rf"\g<1>{source}/raw/{tag}/\g<2>", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
