"""Writes the manifest, the last file of a folder, which makes the folder a checkpoint."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from unified_ckpt.engine.folder.backup import attached_files
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, encode_manifest
from unified_ckpt.runtime.storage.storage import LocalStorage


def write_manifest(storage: LocalStorage, folder: str, manifest: Manifest, *, fsync: bool) -> None:
    """Write the manifest. It lists the files present that the engine did not write.

    Files that appear later are the user's and stay when the checkpoint is replaced.
    """
    manifest = manifest.model_copy(update={"attached": attached_files(storage, folder, manifest)})
    storage.put(f"{folder}/{names.MANIFEST}", encode_manifest(manifest), fsync=fsync)


def versions() -> dict[str, str]:
    """Return the versions of Python, this package, torch and safetensors."""
    package_versions = {"python": platform.python_version()}
    for package in ("unified-ckpt", "torch", "safetensors"):
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            package_versions[package] = "unknown"
    return package_versions
