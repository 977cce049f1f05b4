"""torchrun script: DCP cases against a module: `worker_dcp_cases.py FOLDER SELECTION MODULE`.

Rank r writes `FOLDER/r.json`: case -> problem, or '' if there was none.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

from tests.support.dcp_cases import AREAS
from tests.support.dcp_cases.table import Run, run_cases
from tests.support.processes.worker import started

folder, selection, module = sys.argv[1:]
with started() as (rank, world):
    for area in AREAS:
        importlib.import_module(area)
    warnings.simplefilter("ignore")  # torch's own, of deprecated calls
    run = Run(importlib.import_module(module), rank, world, Path(folder))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(run_cases(run, selection)))
