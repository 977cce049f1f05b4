"""A checkpoint of MaxText, loaded by several ranks under FSDP2: every tensor and moment is whole; a
missing file is every rank's error.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from tests.support.maxtexts import make, tree_of
from tests.support.orbaxes import job, write
from tests.support.processes.launch import torchrun


def test_a_stacked_training_checkpoint_is_loaded_sharded(tmp_path: Path) -> None:
    made = make("llama3", tmp_path / "config")
    save_file(dict(made.moments), tmp_path / "moments.safetensors")
    write([job(tmp_path / "c", tree_of(made, stacked=True, trained=True))], tmp_path / "jobs")
    torchrun(2, "worker_orbax.py", tmp_path, timeout_seconds=150)
