"""The tensors that each rank declares, and the groups of ranks that hold the same tensors.

A declaration carries a sharding rule, never a list of slices, so tables do not grow as
ranks x tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import attrgetter
from typing import NamedTuple

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.sharding.shardings import (
    ShardDim,
    Sharding,
    TensorSpec,
    missing_coordinates,
    spec_of,
)
from unified_ckpt.core.text import format_list, format_ranks, raise_if_any
from unified_ckpt.errors import LayoutError, MismatchError

Key = tuple[str, str]  # (part, fqn)


class TensorDecl(NamedTuple):
    """One tensor as a rank declares it.

    `encoding`: the name of the encoding in which a save stores it, "" for none. A tuple, as there
    is one for each tensor.
    """

    part: str
    fqn: str
    spec: TensorSpec
    sharding: Sharding
    encoding: str = ""

    def __hash__(self) -> int:
        return hash((self.part, self.fqn))  # cheap; almost all declarations differ by name

    @property
    def key(self) -> Key:
        """(part, fqn)."""
        return self.part, self.fqn


sort_key = attrgetter("part", "fqn")


@dataclass(frozen=True, slots=True)
class HolderGroup:
    """The tensors, sorted by (part, fqn), that the ranks of `table_ids` hold together.

    A rank is in one group for each set of tables that its tensors occur in.
    """

    index: int
    table_ids: tuple[str, ...]
    decls: tuple[TensorDecl, ...]


def encode_table(decls: Sequence[TensorDecl]) -> bytes:
    """Encode declarations as canonical JSON: equal tables give equal bytes.

    Each distinct sharding is stored once. Declared boxes are not for tables, as those of ranks
    differ.
    """
    assert all(decl.sharding.box is None for decl in decls)
    numbers: dict[Sharding, int] = {}
    body = []
    for decl in sorted(decls, key=sort_key):
        number = numbers.setdefault(decl.sharding, len(numbers))
        row = [decl.part, decl.fqn, decl.spec.dtype, decl.spec.shape, number]
        body.append([*row, decl.encoding] if decl.encoding else row)
    shardings = [([*map(astuple, sharding.shard_dims)], sharding.ranks) for sharding in numbers]
    return json.dumps({"shardings": shardings, "decls": body}, separators=(",", ":")).encode()


def decode_table(data: bytes) -> list[TensorDecl]:
    """Decode the declarations of `encode_table`."""
    document = json.loads(data)
    shardings = [_decode_sharding(encoded) for encoded in document["shardings"]]
    return [
        TensorDecl(part, fqn, spec_of(dtype, tuple(shape)), shardings[index], *encoding)
        for part, fqn, dtype, shape, index, *encoding in document["decls"]
    ]


def _decode_sharding(encoded: list[list[list[object]]]) -> Sharding:
    shard_dims = (
        tuple(tuple(value) if isinstance(value, list) else value for value in fields)
        for fields in encoded[0]
    )
    return Sharding(tuple(ShardDim(*fields) for fields in shard_dims), tuple(encoded[1]))  # type: ignore[arg-type]


def group_tensors(
    tables: Mapping[str, Sequence[TensorDecl]], ranks_by_table: Mapping[str, Sequence[int]]
) -> list[HolderGroup]:
    """Group tensors by the set of tables that declare them, in a deterministic order.

    `tables`: table id -> declarations. `ranks_by_table`: table id -> the ranks that sent it,
    ascending. A name with two shardings is two declarations, hence in two groups.
    """
    table_ids_in_order = sorted(tables, key=lambda t: ranks_by_table[t][0])
    if len(tables) == 1 and (decls := tables[table_ids_in_order[0]]):  # most layouts
        return [HolderGroup(0, (*tables,), tuple(sorted(decls, key=sort_key)))]
    tables_by_decl = group_by_value(
        (table_id, decl) for table_id in table_ids_in_order for decl in tables[table_id]
    )
    decls_by_tables = group_by_value(
        (decl, tuple(table_ids)) for decl, table_ids in tables_by_decl.items()
    )
    ordered = sorted(
        decls_by_tables.items(),
        key=lambda item: (ranks_by_table[item[0][0]][0], len(item[0]), item[1][0].key),
    )
    return [
        HolderGroup(i, table_ids, tuple(sorted(decls, key=sort_key)))
        for i, (table_ids, decls) in enumerate(ordered)
    ]


def check_consistent(
    tables: Mapping[str, Sequence[TensorDecl]], ranks_by_table: Mapping[str, Sequence[int]]
) -> None:
    """Check that each name has one spec and one sharding on all ranks.

    Raises MismatchError for differing shapes, dtypes or encodings, LayoutError for differing
    shardings. One error lists all of them.
    """
    first_by_key: dict[Key, tuple[TensorDecl, int]] = {}
    spec_problems: list[str] = []
    sharding_problems: list[str] = []
    for table_id in sorted(tables, key=lambda t: ranks_by_table[t][0]):
        rank = ranks_by_table[table_id][0]
        for decl in tables[table_id]:
            first, first_rank = first_by_key.setdefault(decl.key, (decl, rank))
            if first.spec != decl.spec:
                spec_problems.append(
                    f"{decl.part}:{decl.fqn}: got {first.spec.dtype} {first.spec.shape} on rank "
                    f"{first_rank} and {decl.spec.dtype} {decl.spec.shape} on rank {rank}, "
                    "expected one global shape and dtype; "
                    "declare uneven shards with Layout(shapes={...})"
                )
            elif first.encoding != decl.encoding:
                spec_problems.append(
                    f"{decl.part}:{decl.fqn}: got the encoding {first.encoding!r} on rank "
                    f"{first_rank} and {decl.encoding!r} on rank {rank}, "
                    "expected one encoding; pass the same arguments on all ranks"
                )
            elif first.sharding != decl.sharding:
                sharding_problems.append(
                    f"{decl.part}:{decl.fqn}: got {describe_sharding(first.sharding)} on rank "
                    f"{first_rank} and {describe_sharding(decl.sharding)} on rank {rank}, "
                    "expected one sharding; use the same placements on all ranks, or "
                    "declare plain slices with a Layout"
                )
    if spec_problems:
        raise MismatchError(
            format_list("ranks disagree on shapes or dtypes", spec_problems),
            wrong=spec_problems,
        )
    raise_if_any(LayoutError, "ranks disagree on shardings", sharding_problems)


def check_complete(group: HolderGroup, holders: Sequence[int]) -> None:
    """Raise LayoutError if the holders of a group lack shards of its tensors."""
    missing_by_sharding: dict[Sharding, list[tuple[int, ...]]] = {}
    problems = []
    for decl in group.decls:
        if decl.sharding not in missing_by_sharding:
            missing_by_sharding[decl.sharding] = missing_coordinates(decl.sharding, holders)
        if missing_by_sharding[decl.sharding]:
            dims = ", ".join(
                f"{shard_dim.name or 'mesh dim'} of {shard_dim.size}"
                for shard_dim in decl.sharding.shard_dims
            )
            problems.append(
                f"{decl.part}:{decl.fqn}: no rank holds the shard at "
                f"{missing_by_sharding[decl.sharding][0]} of ({dims}); "
                f"ranks {format_ranks(holders)} declare the tensor, expected all its shards there; "
                "save on all ranks of the mesh, or correct the Layout"
            )
    raise_if_any(LayoutError, "tensors with missing shards", problems)


def describe_sharding(sharding: Sharding) -> str:
    """Return a sharding as text, for error messages."""
    if not sharding.shard_dims:
        return "a whole copy on each rank"
    dims_text = "; ".join(map(_describe_shard_dim, sharding.shard_dims))
    return dims_text + (f" on ranks {format_ranks(sharding.ranks)}" if sharding.ranks else "")


def _describe_shard_dim(shard_dim: ShardDim) -> str:
    details = f"{shard_dim.name or 'mesh dim'}, stride {shard_dim.stride}"
    if shard_dim.sections != 1:
        details += f", sections {shard_dim.sections}"
    if shard_dim.chunk_length:
        details += f", padded to {shard_dim.chunk_length}"
    return f"dim {shard_dim.dim} over {shard_dim.size} ({details})"
