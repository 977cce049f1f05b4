"""The random states that a rank resumes from a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.api import open as open_source
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.source.protocol import with_indexes
from unified_ckpt.engine.source.view import SourceView
from unified_ckpt.integrations.run_state import RunState, select_random_states
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.rng import RandomStates


@dataclass(frozen=True, slots=True)
class _SavedRandomStates(Sequence[Any]):
    """The state of `RandomStates` of each saving rank, read on access."""

    rank_extras: Sequence[Any]

    def __getitem__(self, rank: Any) -> Any:
        return select_random_states(self.rank_extras[rank])

    def __len__(self) -> int:
        return len(self.rank_extras)


def saved_random_states(
    state: RunState, report: LoadReport, options: SourceOptions
) -> Mapping[str, Any] | None:
    """Return the random states of this rank, None if the checkpoint has none.

    `report`: of a load of the same checkpoint. Another number of ranks derives states, which
    changes the current ones.
    """
    own = select_random_states(report.rank_extra)
    if own is not None or not state.has_random_states:
        return own
    rank, world = report.data_coordinate  # ranks that read the same data share a seed
    with open_source(state.path, options=options) as view:
        saved = _SavedRandomStates(SourceView(with_indexes(view.source)).rank_extra)
        RandomStates().load_from_ranks(saved, rank=rank, world=world)
    return RandomStates().state_dict()


def random_states_outcome(state: RunState, report: LoadReport) -> str:
    """Return what becomes of the random states, for the log. `report`: as above."""
    if select_random_states(report.rank_extra) is not None:
        return "loaded"
    if not state.has_random_states:
        return "begin anew"
    return f"derived from those of {state.rank_extras} ranks"
