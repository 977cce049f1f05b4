"""When a save compares replicas, and what its ranks wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unified_ckpt.engine.save.call import SaveCall
from unified_ckpt.engine.save.layout.layout_plan import LayoutPlan
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.replica_check import ReplicaCheck, ReplicaDigests, is_large_due
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


def make_replica_check(
    call: SaveCall,
    collective: Collective,
    request: SaveRequest,
    layout: LayoutPlan,
    tensors: Sequence[LocalTensor],
) -> ReplicaCheck | None:
    """Return the comparison of this save, over all ranks; None if the options ask for none.

    `tensors`: what this rank stores, as the caller declared it.
    """
    mode, comparisons = request.options.check_replicas, call.layouts.comparisons
    if mode == "never":
        return None
    has_large = is_large_due(mode, comparisons=comparisons)
    due = [replicas for replicas in layout.replicas if has_large or replicas.kind != "large"]
    return ReplicaCheck(
        collective,
        ReplicaDigests(due, tensors, call.buffers.replicas),
        any_differs_is_error=mode == "always" or (mode == "first" and comparisons == 0),
        only_records=mode == "warn",
    )


@contextmanager
def comparing_replicas(planned: PlannedSave) -> Iterator[None]:
    """Collective. Compare replicas beside the block. LayoutError if a difference is an error.

    With a new plan, the ranks wait for the result before the block. Otherwise they read it after
    the block, when rank 0 has it: a save that reuses its plan waits for no message more.
    """
    check, scope = planned.replica_check, planned.scope
    if check is None:
        yield
        return
    waits = not scope.all_ranks.all_cached
    with scope.waiting():
        check.send()
        if waits:
            planned.replica_differences.extend(check.finish())
    yield
    with scope.waiting():
        if not waits:
            planned.replica_differences.extend(check.finish())
    planned.call.layouts.comparisons += 1
