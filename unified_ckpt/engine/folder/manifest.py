"""TODO docstring."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from unified_ckpt.engine.folder.backup import attached_files
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, encode_manifest
from unified_ckpt.runtime.storage.storage import LocalStorage


def write_manifest(storage: LocalStorage, folder: str, manifest: Manifest, *, fsync: bool) -> None:
    """The last file. It names the files that the engine did not write: what appears later is the
    user's.
    """
    manifest = manifest.model_copy(update={"attached": attached_files(storage, folder, manifest)})
    storage.put(f"{folder}/{names.MANIFEST}", encode_manifest(manifest), fsync=fsync)


def versions() -> dict[str, str]:
    package_versions: dict[str, Any] = {"python": platform.python_version()}
    for package in ("unified-ckpt", "torch", "safetensors"):
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            package_versions[package] = "unknown"
    return package_versions
