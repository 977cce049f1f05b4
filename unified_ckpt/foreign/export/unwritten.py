"""What a conversion does not write, for every target format: parts, and state beside tensors.

How state could be lost silently: a format has no place for it, and its writer ignores it. So this
module lists what each format stores, and everything else of the source is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from unified_ckpt.core.text import step_text
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.foreign.paddle.export.trainer_files import unread_state
from unified_ckpt.foreign.paddle.tensors import BETAS
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.format.names import OPTIMIZER, WITHOUT_MASTERS

_BESIDE_TENSORS = ("step", "extra", "rank_extra", "param_groups", "modules", "metrics", OPTIMIZER)
_OF_PADDLEFORMERS = ("step", "extra:trainer_state", "extra:scheduler", f"extra:{BETAS}")
# What each format stores beside tensors, as prefixes of names.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "unified": ("",),
    "torch": _BESIDE_TENSORS,
    "dcp": _BESIDE_TENSORS,
    "orbax": ("step", OPTIMIZER),
    "maxtext": (OPTIMIZER,),
    "paddle": ("step", "extra:trainer_state", f"extra:{BETAS}"),
    "paddleformers": _OF_PADDLEFORMERS,
    "paddle-flex": _OF_PADDLEFORMERS,
    "huggingface": (),
    "peft": ("extra:adapters",),
}
# Formats of weights alone. What else a training state has is reported, without a warning.
WEIGHTS_ONLY = ("huggingface", "peft")


def unwritten_state(
    source: Source, target_format: str, *, selected: Collection[str], written: Collection[str]
) -> list[str]:
    """Return names of the parts and of the other state that a conversion does not write.

    `selected`: the parts to convert; others are not named. `written`: those that are written, if
    only as another part.
    """
    unwritten = [part for part in selected if part not in (*written, WITHOUT_MASTERS)]
    writes_optimizer = OPTIMIZER in selected and OPTIMIZER in written
    # Names of optimizer state that is stored by position may take building the model.
    indexed = None if writes_optimizer else source.indexed
    metadata = (source if indexed is None else indexed.without_optimizer).metadata()
    names = [name for name in _state_names(metadata) if not name.startswith(_PLACES[target_format])]
    if OPTIMIZER in source.parts and not writes_optimizer:  # it is named, or was not selected
        names = [name for name in names if not name.startswith((OPTIMIZER, "param_groups"))]
    names += unread_state(metadata, target_format)
    if target_format != "unified" and metadata.rank_values is not None:
        names += [f"{name} of each rank" for name in metadata.rank_values.names]
    return unwritten + names


def _state_names(metadata: SourceMetadata) -> Iterator[str]:
    """Yield the names of all state beside tensors: fields, and the keys of `extra`."""
    if isinstance(metadata.extra, Mapping):
        yield from (f"extra:{key}" for key in metadata.extra)
    fields = {
        "step": metadata.step is not None,
        "extra": metadata.extra is not None and not isinstance(metadata.extra, Mapping),
        "rank_extra": metadata.rank_extras,
        "param_groups": metadata.groups,
        "modules": metadata.modules,
        "metrics": metadata.metrics,
    }
    yield from (name for name, value in fields.items() if value)
    states = {state for scalars in metadata.scalars.values() for state in scalars}
    yield from (f"{OPTIMIZER}:*/{state}" for state in sorted(states))


def folders_of_other_saves(
    manifests: Mapping[str, Manifest | None], save_id: str | None
) -> list[str]:
    """Return those of several folders that hold another save than the one that was read."""
    return [
        f"{path} (save {manifest.save_id}, {step_text(manifest.step)})"
        for path, manifest in manifests.items()
        if len(manifests) > 1 and manifest is not None and manifest.save_id != save_id
    ]
