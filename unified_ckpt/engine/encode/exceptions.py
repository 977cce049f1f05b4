"""Collects the elements that encodings cannot hold, from all ranks.

A value could be lost if a rank forgot one. So whoever encodes elements examines them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.engine.encode.stored_models import StoredModels
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, chunks
from unified_ckpt.format.exceptions import (
    Elements,
    encode_exceptions,
    is_too_many,
    join_elements,
    parse_exceptions,
)
from unified_ckpt.runtime.comm.collective import Collective

ExceptionsByPart = dict[str, dict[str, Elements]]  # part -> name -> elements


@dataclass(slots=True)
class Exceptions:
    """Elements that encodings cannot hold, by tensor, as this rank found them in any order.

    `models`: the stored model, while a save writes. `total`: the number of all ranks, once they are
    gathered.
    """

    found: dict[Key, list[Elements]] = field(default_factory=dict)
    models: StoredModels | None = None
    total: int = 0

    def add(self, key: Key, elements: Elements) -> None:
        """Add elements of one tensor, with flat indices in the global tensor."""
        if len(elements[0]):
            self.found.setdefault(key, []).append(elements)

    def by_part(self) -> ExceptionsByPart:
        """Return the elements of each tensor, joined."""
        joined: ExceptionsByPart = {}
        for (part, fqn), elements in self.found.items():
            joined.setdefault(part, {})[fqn] = join_elements(elements)
        return joined


def gather_exceptions(
    collective: Collective, exceptions: Exceptions, shapes: Mapping[Key, Sequence[int]]
) -> ExceptionsByPart:
    """Collective. Return on rank 0 the exceptions of all ranks, and nothing elsewhere.

    `shapes`: on rank 0, those of all encoded tensors.
    """
    bodies = {
        part: encode_exceptions(part, elements)[0]
        for part, elements in exceptions.by_part().items()
    }
    joined = b"".join(bodies.values())
    pieces = chunks(0, len(joined))  # the store limits the bytes of a value
    for number, (start, stop) in enumerate(pieces):
        collective.put(f"exceptions/{collective.rank}/{number}", joined[start:stop])
    sizes = {part: len(body) for part, body in bodies.items()}
    ranks = range(collective.world)
    sizes_by_rank = collective.collect_json("exception-sizes", sizes, dst=0, ranks=ranks)
    shapes_by_part: dict[str, dict[str, Sequence[int]]] = {}
    for (part, fqn), shape in shapes.items():
        shapes_by_part.setdefault(part, {})[fqn] = shape
    gathered = Exceptions()
    for rank, sizes in enumerate(sizes_by_rank):
        count = -(-sum(sizes.values()) // CHUNK_NBYTES)
        joined = b"".join(collective.get(f"exceptions/{rank}/{number}") for number in range(count))
        for part, nbytes in sizes.items():
            body, joined = joined[:nbytes], joined[nbytes:]
            label = f"exceptions of rank {rank}"
            for fqn, elements in parse_exceptions(body, shapes_by_part[part], file=label).items():
                gathered.add((part, fqn), elements)
    by_part = gathered.by_part()
    total = sum(len(indices) for found in by_part.values() for indices, _ in found.values())
    exceptions.total = collective.broadcast_json("exception-count", total)
    return by_part


def has_too_many(exceptions: ExceptionsByPart, decls: Collection[TensorDecl]) -> bool:
    """Return whether one of these tensors would now be stored plain."""
    return any(
        is_too_many(len(exceptions[decl.part][decl.fqn][0]), decl.spec.shape)
        for decl in decls
        if decl.fqn in exceptions.get(decl.part, {})
    )
