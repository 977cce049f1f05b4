"""A rank on one of two nodes, with two tiers. It resumes, then saves in the background at every
step until it ends or is killed. Run as a program with the arguments of `serve`, it exits normally.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

import unified_ckpt as uc
from tests.support.processes.sigkill_worker import join, redirect_output, resume_and_save

PER_NODE = 2
NODES = 2
WORLD = PER_NODE * NODES


def serve(rank: int, port: int, prefix: str, top: Path, last_step: int, output: Path) -> None:
    """Save every step to the node's folder and every fourth to the root. The manager stays open."""
    redirect_output(output, seconds=90)
    logging.basicConfig(level=logging.WARNING)
    try:
        node, mesh = rank // PER_NODE, join(rank, WORLD, port, prefix)
        tier = {
            "local_directory": str(top / f"local-{node}"),
            "local_interval_steps": 1,
            "keep_latest_local": 2,
        }
        options = uc.ManagerOptions(interval_steps=4, keep_latest=2, on_preemption=False, **tier)
        saving = uc.SaveOptions(timeout_seconds=20)
        manager = uc.CheckpointManager(
            top / "root", options=options, save_options=saving, node=f"node {node}"
        )
        resume_and_save(manager, mesh, rank, last_step=last_step)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    serve(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
        int(sys.argv[5]),
        Path(sys.argv[6]),
    )
