"""What PyTorch's own tests of DCP check, against DCP and against `unified_ckpt.dcp`.

The cases are in tests/support/dcp_cases. They must hold for DCP, which validates them.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from tests.support.dcp_cases import AREAS
from tests.support.dcp_cases.table import CASES, DCP, OURS, WORLD
from tests.support.processes.launch import torchrun

# Files of test/distributed/checkpoint, as of torch 2.14, that check no save or load of state.
WITHOUT_CASES = {
    "a checkpointer that is not a part of torch.distributed.checkpoint": [
        *("_experimental/test_barriers", "_experimental/test_builder"),
        *("_experimental/test_checkpoint_process", "_experimental/test_checkpoint_reader"),
        *("_experimental/test_checkpoint_writer", "_experimental/test_checkpointer"),
        *("_experimental/test_staging", "_experimental/test_types"),
    ],
    "functions that only DCP's storages call": [
        *("test_async_executor", "test_consolidate_hf_safetensors", "test_quantized_hf_storage"),
        *("test_cuobj_rdma_storage", "test_hf_safetensor_e2e", "test_metadata_warning"),
        *("test_restricted_metadata_unpickler", "test_utils"),
    ],
    "state between processes, without a folder": ["test_pg_transport", "test_state_dict_utils"],
    "pinned memory, which needs a GPU": ["test_shared_and_pinned_memory"],
    "the dtype of new optimizer state": ["test_grad_dtype", "test_optimizer"],
    "planners of one's own": ["test_pg_aware_planner"],
}
FILES = [
    *("e2e/test_e2e_save_and_load", "e2e/test_fine_tuning", "e2e/test_fsdp_ep"),
    *("e2e/test_pipeline", "test_2d_fsdp_dt_checkpoint", "test_async_process_executor"),
    *("test_checkpoint", "test_compatibility", "test_cooperative_planner", "test_dedup_tensors"),
    *("test_dtensor_checkpoint", "test_dtensor_resharding", "test_file_system_checkpoint"),
    *("test_file_system_checkpoint_cpu", "test_format_utils", "test_fsdp_model_state"),
    *("test_fsdp_optim_state", "test_fsdp_tp_checkpoint_conversion", "test_fsspec"),
    *("test_hf_storage", "test_hsdp_checkpoint", "test_list_stored_state_dict"),
    *("test_nested_dict", "test_optimizer_flattened_missing_state", "test_optimizer_stateless"),
    *("test_planner", "test_save_load_api", "test_state_dict", "test_state_dict_stager"),
    *("test_torch_save_to_dcp", "test_tp_checkpoint", "test_traverse"),
]


def failures(root: Path, selection: str, module: str) -> dict[str, str]:
    """Run cases in real ranks. Return the problem of each that failed, by name and rank."""
    torchrun(WORLD, "worker_dcp_cases.py", root, selection, module, timeout_seconds=280)
    problems = {
        f"{name} on rank {rank}": problem
        for rank in range(WORLD)
        for name, problem in json.loads((root / f"{rank}.json").read_text()).items()
    }
    assert len(problems) > 20 * WORLD
    return {name: problem for name, problem in problems.items() if problem}


def test_thin_cut_holds_for_ours(tmp_path: Path) -> None:
    failed = failures(tmp_path, "thin", OURS)
    assert not failed, "\n".join(map(": ".join, failed.items()))


@pytest.mark.integration
@pytest.mark.parametrize("module", [DCP, OURS])
def test_cases_hold(tmp_path: Path, module: str) -> None:
    failed = failures(tmp_path, "all", module)
    assert not failed, "\n".join(map(": ".join, failed.items()))


def test_files_of_pytorch_have_cases() -> None:
    for area in AREAS:
        importlib.import_module(area)
    seen = {name for row in CASES for name in re.findall(r"[\w/]*test_\w+", row.seen_in)}
    assert seen == set(FILES)
    assert seen.isdisjoint(name for names in WITHOUT_CASES.values() for name in names)
