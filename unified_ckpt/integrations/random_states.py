"""The random states that a rank resumes from a checkpoint that another trainer saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unified_ckpt.api import open as open_source
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.source.protocol import with_indexes
from unified_ckpt.integrations.run_state import RunState, SavedRandomStates, select_random_states
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.rng import RandomStates


def saved_random_states(
    state: RunState, report: LoadReport, options: SourceOptions
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the random states of this rank, and what they are, for the log. None if the
    checkpoint has none.

    `report`: of a load of the same checkpoint. Another number of ranks derives states, which
    changes the current ones.
    """
    own = select_random_states(report.rank_extra)
    if own is not None:
        return own, "loaded"
    if not state.has_random_states:
        return None, "begin anew"
    rank, world = report.data_coordinate
    with open_source(state.path, options=options) as view:
        saved = SavedRandomStates(with_indexes(view.source), state.rank_extras)
        RandomStates().load_from_ranks(saved, rank=rank, world=world)
    return RandomStates().state_dict(), f"derived from those of {state.rank_extras} ranks"
