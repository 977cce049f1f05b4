"""How a checkpoint is stored: its compression, and what it takes for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from math import prod

from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format.encoded_tensors import compression_name
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.storage import LocalStorage

_COUNTED_PARTS = ("model", "master_weights")  # the first that is there has all parameters


@dataclass(frozen=True, slots=True)
class Form:
    """A compression, and the bytes in files of tensors for each parameter, if there are any."""

    compression: str
    nbytes_per_parameter: float | None

    def __str__(self) -> str:
        if self.nbytes_per_parameter is None:
            return self.compression
        return f"{self.compression}, {self.nbytes_per_parameter:.4g} B/param"


class StepForms:
    """The forms of steps. The headers of a complete step are read once, however often it is
    visited. `on_visit` is called at each visit.
    """

    def __init__(self, *, on_visit: Callable[[], object] = lambda: None) -> None:
        self._on_visit = on_visit
        self._forms: dict[tuple[str, str | None], Form | None] = {}

    def visit(self, record: StepRecord, manifest: Manifest) -> None:
        """Read the form of a step. For use in a scan."""
        self._on_visit()
        key = record.path, record.save_id
        if key in self._forms and record.status == "complete":
            return
        if is_bucket_url(record.path):
            # Without headers, which would take requests for each file.
            parts = [manifest.parts[part] for part in record.parts]
            encodings = [each for part in parts for each in part.encodings.values()]
            self._forms[key] = Form(compression_name(encodings), None)
            return
        try:
            with closing(open_folder(LocalStorage(record.path), manifest=manifest)) as folder:
                self._forms[key] = form_of(folder)
        except CheckpointError:  # other columns say what is damaged
            self._forms[key] = None

    def of(self, record: StepRecord) -> Form | None:
        """Return the form of a step; None if it has none, or its headers cannot be read."""
        return None if record.step is None else self._forms.get((record.path, record.save_id))


def form_of(folder: Folder) -> Form | None:
    """Return the form of a folder, from its headers; None without a manifest."""
    if folder.manifest is None:
        return None
    records = [record for part in folder.encodings().values() for record in part.values()]
    counted = next((part for part in _COUNTED_PARTS if part in folder.parts), None)
    count = 0
    if counted is not None and folder.manifest.node_group is None:
        with suppress(CheckpointError):  # other lines say what is damaged
            specs = folder.specs(counted, folder.names(counted))
            count = sum(prod(spec.shape) for spec in specs.values())
    parts = [folder.manifest.parts[part] for part in folder.parts]
    files = [record for part in parts for record in part.files.values()]
    files += [part.exceptions for part in parts if part.exceptions is not None]
    nbytes = sum(file.nbytes for file in files)
    return Form(compression_name(records), nbytes / count if count else None)
