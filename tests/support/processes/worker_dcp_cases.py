"""torchrun script: the cases of DCP against one module, or several, one after the other.

Rank r writes `FOLDER/MODULE.r.json`: case -> problem, or '' if there was none.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from tests.support.dcp_cases import AREAS
from tests.support.dcp_cases.table import Run, run_cases
from tests.support.processes.worker import started

root, selection, *modules = sys.argv[1:]
with started() as (rank, world):
    for area in AREAS:
        importlib.import_module(area)
    warnings.simplefilter("ignore")  # torch's own, of deprecated calls
    for name in modules:
        folder = Path(root) / name
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        run = Run(importlib.import_module(name), rank, world, folder)
        problems = run_cases(run, selection)
        (Path(root) / f"{name}.{rank}.json").write_text(json.dumps(problems))
