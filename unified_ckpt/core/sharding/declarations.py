"""What ranks announce of their state, and which ranks hold a tensor together. Rules, never slice
lists: never ranks x tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from unified_ckpt.core.sharding.shardings import (
    ShardDim,
    Sharding,
    TensorSpec,
    missing_coordinates,
    spec_of,
)
from unified_ckpt.core.text import format_list, format_ranks
from unified_ckpt.errors import LayoutError, MismatchError

Key = tuple[str, str]  # (part, fqn)


@dataclass(frozen=True, slots=True)
class TensorDecl:
    """One tensor as a rank announces it."""

    part: str
    fqn: str
    spec: TensorSpec
    sharding: Sharding

    def __hash__(self) -> int:
        return hash((self.part, self.fqn))  # rows differ in their names, all but a few

    @property
    def key(self) -> Key:
        return self.part, self.fqn


sort_key = attrgetter("part", "fqn")  # sorts rows


@dataclass(frozen=True, slots=True)
class HolderGroup:
    """A holder group: the ranks whose tables name the same tensors, and those tensors, sorted by
    (part, fqn).
    """

    index: int
    table_ids: tuple[str, ...]
    decls: tuple[TensorDecl, ...]


def encode_table(decls: Sequence[TensorDecl]) -> bytes:
    """A table as canonical JSON: equal tables, equal bytes. Each distinct rule appears once."""
    shardings: dict[str, int] = {}
    index_by_id: dict[
        int, int
    ] = {}  # id of a sharding, of which many rows have the same -> the number of its rule
    body = []
    for decl in sorted(decls, key=sort_key):
        index = index_by_id.get(id(decl.sharding))
        if index is None:
            encoded = json.dumps(_encode_sharding(decl.sharding), separators=(",", ":"))
            index = index_by_id[id(decl.sharding)] = shardings.setdefault(encoded, len(shardings))
        body.append([decl.part, decl.fqn, decl.spec.dtype, decl.spec.shape, index])
    return json.dumps(
        {"rules": [json.loads(encoded) for encoded in shardings], "rows": body},
        separators=(",", ":"),
    ).encode()


def decode_table(data: bytes) -> list[TensorDecl]:
    """The inverse of `encode_table`."""
    table = json.loads(data)
    shardings = [_decode_sharding(sharding) for sharding in table["rules"]]
    return [
        TensorDecl(part, fqn, spec_of(dtype, tuple(shape)), shardings[sharding])
        for part, fqn, dtype, shape, sharding in table["rows"]
    ]


def _encode_sharding(sharding: Sharding) -> list[object]:
    return [
        [
            [
                shard_dim.dim,
                shard_dim.size,
                shard_dim.stride,
                shard_dim.sections,
                shard_dim.chunk_length,
                shard_dim.name,
                shard_dim.padded_length,
            ]
            for shard_dim in sharding.shard_dims
        ],
        sharding.ranks,
    ]


def _decode_sharding(encoded: list[list[list[object]]]) -> Sharding:
    shard_dims = (
        tuple(tuple(value) if isinstance(value, list) else value for value in fields)
        for fields in encoded[0]
    )
    return Sharding(tuple(ShardDim(*fields) for fields in shard_dims), tuple(encoded[1]))  # type: ignore[arg-type]


def group_tables(
    tables: Mapping[str, Sequence[TensorDecl]], ranks_by_table: Mapping[str, Sequence[int]]
) -> list[HolderGroup]:
    """The groups of ranks that name the same rows, in an order that depends on nothing but the
    input.

    `tables`: table id -> rows; `ranks_by_table`: table id -> the ranks that announced it,
    ascending. Rows are the same when they are equal: one name under two rules makes two groups.
    """
    tables_by_decl: dict[TensorDecl, list[str]] = {}
    for table in sorted(tables, key=lambda t: ranks_by_table[t][0]):
        for decl in tables[table]:
            tables_by_decl.setdefault(decl, []).append(table)
    decls_by_tables: dict[tuple[str, ...], list[TensorDecl]] = {}
    for decl, table_ids in tables_by_decl.items():
        decls_by_tables.setdefault(tuple(table_ids), []).append(decl)
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
    """MismatchError where one name has two shapes or dtypes, LayoutError where it has two rules;
    all of them in one text.
    """
    first_by_key: dict[Key, tuple[TensorDecl, int]] = {}
    spec_problems: list[str] = []
    sharding_problems: list[str] = []
    for table in sorted(tables, key=lambda t: ranks_by_table[t][0]):
        rank = ranks_by_table[table][0]
        for decl in tables[table]:
            first, first_rank = first_by_key.setdefault(decl.key, (decl, rank))
            if first.spec != decl.spec:
                spec_problems.append(
                    f"{decl.part}:{decl.fqn}: rank {first_rank} has {first.spec.dtype} {first.spec.shape}, rank {rank} has {decl.spec.dtype} "
                    f"{decl.spec.shape}; needed one global shape and dtype; give uneven parts a Layout with shapes={{...}}"
                )
            elif first.sharding != decl.sharding:
                sharding_problems.append(
                    f"{decl.part}:{decl.fqn}: rank {first_rank} holds it by {describe_sharding(first.sharding)}, rank {rank} by "
                    f"{describe_sharding(decl.sharding)}; needed one rule"
                )
    if spec_problems:
        raise MismatchError(
            format_list("one name is held with two shapes or dtypes", spec_problems),
            wrong=spec_problems,
        )
    if sharding_problems:
        raise LayoutError(
            format_list("unequal overlap: one name is held by two rules", sharding_problems)
        )


def check_complete(group: HolderGroup, holders: Sequence[int]) -> None:
    """LayoutError where the holders of a group do not hold whole copies of its tensors: names the
    tensors and the ranks.
    """
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
                f"{decl.part}:{decl.fqn}: no rank holds coordinate {missing_by_sharding[decl.sharding][0]} of ({dims}); ranks {format_ranks(holders)} "
                "name it; needed all coordinates"
            )
    if problems:
        raise LayoutError(format_list("gap: the ranks do not hold whole tensors", problems))


def describe_sharding(sharding: Sharding) -> str:
    """A rule in words, for error texts."""
    if not sharding.shard_dims:
        return "a whole copy on each rank"
    dims_text = "; ".join(
        f"dim {shard_dim.dim} over {shard_dim.size} ({shard_dim.name or 'mesh dim'}, stride {shard_dim.stride}{_shard_dim_details(shard_dim)})"
        for shard_dim in sharding.shard_dims
    )
    return dims_text + (f" on ranks {format_ranks(sharding.ranks)}" if sharding.ranks else "")


def _shard_dim_details(shard_dim: ShardDim) -> str:
    return (f", sections {shard_dim.sections}" if shard_dim.sections != 1 else "") + (
        f", padded to {shard_dim.chunk_length}" if shard_dim.chunk_length else ""
    )
