"""Rewrites and compares folders of PaddleNLP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def changed(folder: Path, name: str, **values: Any) -> None:
    """Write a JSON file with changed values; None removes a key."""
    fields = {**json.loads((folder / name).read_text()), **values}
    (folder / name).write_text(
        json.dumps({key: value for key, value in fields.items() if value is not None})
    )


def rewritten(folder: Path, stem: str, change: Any) -> None:
    """Rewrite a part's single file with other tensors; the index stays."""
    path = next(folder.glob(f"{stem}-*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "np"})
