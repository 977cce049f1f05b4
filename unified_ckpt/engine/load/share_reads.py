"""Whether machines that see one folder read it for each other: worth while where they want the same bytes of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unified_ckpt.core.sharding.declarations import group_tables
from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.engine.nodes.storage import JointStorage
from unified_ckpt.engine.plan.holders import Census, holders_of
from unified_ckpt.engine.source.protocol import Catalog

_WORTH = 1.5  # times what is wanted, that all machines together would read


def overlap(census: Census, machines: Sequence[int]) -> float:
    """Bytes that the machines want, each counted for itself, over bytes that any of them wants. Parts count as if they were even."""
    together = apart = 0.0
    for group in group_tables(census.tables, census.roll):
        nbytes: dict[Sharding, int] = {}
        for row in group.rows:
            nbytes[row.sharding] = nbytes.get(row.sharding, 0) + row.spec.nbytes
        holders = holders_of(group, census.roll)
        for sharding, size in nbytes.items():
            places = {
                (machines[rank], sharding.coordinates(at))
                for rank in holders
                if (at := sharding.position(rank)) is not None
            }
            size_of_one = size / prod(cut.size for cut in sharding.cuts)
            apart += size_of_one * len(places)
            together += size_of_one * len({place for _, place in places})
    return apart / together if together else 1.0


def share_reads(catalog: Catalog, how: str, wanted: float) -> None:
    """By the option and the overlap; the same on every rank. Only a checkpoint of several machines can."""
    if isinstance(catalog.storage, JointStorage) and (
        how == "always" or (how == "auto" and wanted >= _WORTH)
    ):
        catalog.storage.share(slow_only=how == "auto")
