"""Says how to install an optional package. One wording for every place that needs one."""

from __future__ import annotations

import importlib.metadata
import re
import shlex

from unified_ckpt.errors import MissingPackageError

_DISTRIBUTION = "unified-ckpt"
_REQUIREMENT = re.compile(r"(?P<package>[^;]+?) *; *extra == [\"'](?P<extra>[\w-]+)[\"']")


def missing_package(feature: str, error: ImportError, *, extra: str) -> MissingPackageError:
    """Return the error for a feature whose packages, those of `extra`, cannot be imported.

    It names the packages, not `unified-ckpt[extra]`, which pip would look up on an index.
    """
    packages = _packages(extra)
    command = shlex.join(["pip", "install", *packages])
    advice = command if packages else f"pip install '.[{extra}]' in a clone of {_DISTRIBUTION}"
    return MissingPackageError(f"{feature}: {error}; run: {advice}")


def _packages(extra: str) -> list[str]:
    """Return the requirements of an extra, without the dependencies of every installation.

    Empty if the package itself is not installed, as on a bare PYTHONPATH.
    """
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = filter(None, map(_REQUIREMENT.fullmatch, requirements))
    return [match["package"] for match in matches if match["extra"] == extra]
