"""Turns what a Paddle folder holds, of any kind, into a Source in torch's names and layouts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.files.json import CONFIG, read_config
from unified_ckpt.foreign.paddle.names import ModelConfig, parse_config
from unified_ckpt.foreign.paddle.tensors import BETAS, PaddleTensors, to_torch
from unified_ckpt.foreign.paddle.trainer_state import read_trainer_state
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.views.sharded_source import ShardedSource, SourceExtras


@dataclass(frozen=True, slots=True)
class FolderContents:
    """What a folder holds. `format`: the Source's. `entries`: the names in the folder.

    `pickled`: what the optimizer's files hold of the trainer's state. `refused`: why parts are not
    read. `left_out`: as in `SourceMetadata`. `step`: if the trainer's state has none.
    """

    format: str
    entries: Collection[str]
    tensors: PaddleTensors
    pickled: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    step: int | None = None


def read_model_config(root: str, options: SourceOptions) -> tuple[dict[str, Any], ModelConfig]:
    """Return the model's config.json, {} without any, and what names and shapes depend on.

    FormatError if Hugging Face's names are asked for, but not known.
    """
    has_config = options.config or is_file(os.path.join(root, CONFIG))
    config = dict(read_config(options.config or root)) if has_config else {}
    model = parse_config(config)
    if options.names == "huggingface" and not model.has_hf_names:
        raise FormatError(
            f"{root}: no Hugging Face names are known for model_type {model.model_type!r}; pass a "
            "config.json, or names='own'"
        )
    return config, model


def build_source(
    root: str, contents: FolderContents, model: ModelConfig, options: SourceOptions
) -> ShardedSource:
    """Return the Source of a folder.

    Raises FormatError or IncompleteError naming parameters and files.
    """
    step, extra, group_options = read_trainer_state(root, contents.entries, contents.pickled)
    rename = model.has_hf_names and options.names != "own"
    tensors = to_torch(root, contents.tensors, model, rename=rename, steps=step)
    if tensors.betas is not None:  # an export to Paddle needs them for its powers
        place = extra if None in tensors.betas else group_options
        place[BETAS] = tensors.betas
    group = {"names": tensors.names, "options": group_options}
    metadata = SourceMetadata(
        step=contents.step if step is None else step,
        extra=extra or None,
        groups=[group] if tensors.names else [],
        left_out=contents.left_out,
    )
    return ShardedSource(
        root,
        tensors.tensors,
        format=contents.format,
        metadata=metadata,
        aliases=tensors.aliases,
        extras=SourceExtras(contents.refused),
    )
