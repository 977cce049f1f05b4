"""Gathers where the time of a collective went, from all of its ranks."""

from __future__ import annotations

from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.phases import Phase


def gather_phases(collective: Collective) -> dict[int, tuple[Phase, ...]]:
    """Return the phases of all ranks so far on rank 0, an empty dict elsewhere.

    Costs one key per rank, of some 200 bytes.
    """
    phases = [[phase.name, phase.start, phase.seconds] for phase in collective.clock.phases()]
    gathered = collective.collect_json("phases", phases, dst=0, ranks=range(collective.world))
    return {
        collective.ranks[index]: tuple(Phase(*fields) for fields in phases)
        for index, phases in enumerate(gathered)
    }
