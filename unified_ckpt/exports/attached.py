"""What goes along with a checkpoint that is written anew: config, tokenizer, and what else lies beside the weights and is not weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase

from unified_ckpt.engine.commit import PROBE, committed_at
from unified_ckpt.format import names
from unified_ckpt.sources.json_files import CONFIG, config_file

_HUGGING_FACE = (
    *(CONFIG, "generation_config.json", "adapter_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "chat_template*"),
    *("trainer_state.json", "README.md", "LICENSE*"),
)
_OF_TRAINING = ("trainer_state.json",)


def attach(folder: str, *, source: str, config: str | None, weights_only: bool) -> None:
    """Copies to `folder`. `config`: where a Hugging Face config is, if not in the source. `weights_only`: nothing of a training."""
    for name in found_beside(source, weights_only=weights_only):
        there = os.path.join(source, name)
        copy = shutil.copytree if os.path.isdir(there) else shutil.copyfile
        copy(there, os.path.join(folder, name))
    if config is not None and not os.path.exists(os.path.join(folder, CONFIG)):
        shutil.copyfile(config_file(config), os.path.join(folder, CONFIG))


def found_beside(source: str, *, weights_only: bool) -> Sequence[str]:
    """Entries of a source folder that are no weights and no state: of a unified one all that is not the engine's."""
    if not os.path.isdir(source):
        return ()
    entries = sorted(os.listdir(source))
    manifest = committed_at(source)
    if manifest is not None:
        ours = {names.MANIFEST, names.REPLICAS, PROBE, *manifest.files(), *map(names.index_name, manifest.parts)}
        entries = [name for name in entries if name not in ours]
    else:
        entries = [name for name in entries if any(fnmatchcase(name, known) for known in _HUGGING_FACE)]
        entries = [name for name in entries if os.path.isfile(os.path.join(source, name))]
    return [name for name in entries if not weights_only or name not in _OF_TRAINING]
