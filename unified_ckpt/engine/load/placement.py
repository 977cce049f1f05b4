"""Where the values of this rank come from: the mesh of the save, and that of the load's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.sharding.rank_mesh import RankLayout, RankMesh, RankPlacement, place_rank
from unified_ckpt.engine.plan.sharding_records import decode_rule
from unified_ckpt.engine.source.protocol import Source, SourceMetadata
from unified_ckpt.engine.source.rank_values import with_values_of_ranks
from unified_ckpt.format.names import MODEL
from unified_ckpt.options import LoadOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.flatten import FlatState
from unified_ckpt.runtime.torch_state.meshes import rank_mesh
from unified_ckpt.runtime.torch_state.placements import ShardingResolver


@dataclass(frozen=True, slots=True)
class PlacedMetadata:
    """What a checkpoint holds besides tensors, with the values of this rank.

    `mesh`: the mesh of all ranks, if the tensors of the load have one. `unplaced`: names of values
    that differed between ranks, of which `metadata` has those of the lowest rank. `saved_ranks`:
    how many ranks saved it, if the checkpoint has a value or a mesh of them.
    """

    metadata: SourceMetadata
    mesh: RankMesh | None
    placement: RankPlacement
    unplaced: tuple[str, ...]
    saved_ranks: int | None = None

    @property
    def data_coordinate(self) -> tuple[int, int]:
        """This rank's data coordinate, and their number."""
        return self.placement.coordinate, self.placement.count


def place_metadata(
    comm: Comm,
    source: Source,
    state: FlatState,
    resolver: ShardingResolver,
    options: LoadOptions,
) -> PlacedMetadata:
    """Return the metadata of a source for this rank, and which saved values the rank gets."""
    metadata = source.metadata()
    mesh = rank_mesh(
        resolver,
        ddp_world=state.model.ddp_world,
        data_dims=options.data_dims,
        saved=metadata.rank_mesh,
    )
    values = metadata.rank_values
    saved_world = metadata.rank_extras if values is None else values.world_size
    is_known = mesh is None or mesh.data_coordinates(options.data_dims) is not None
    placement = place_rank(
        RankLayout(saved_world, metadata.rank_mesh),
        RankLayout(comm.world, mesh),
        comm.rank,
        data_dims=options.data_dims,
        equal_shardings=is_known or _holds_saved_shards(source, metadata, state, comm.rank),
    )
    placed, unplaced = with_values_of_ranks(source, metadata, placement.values.ranks)
    saved_mesh = metadata.rank_mesh
    saved_ranks = saved_world or (saved_mesh.world if saved_mesh is not None else None)
    return PlacedMetadata(placed, mesh, placement, unplaced, saved_ranks)


def _holds_saved_shards(
    source: Source, metadata: SourceMetadata, state: FlatState, rank: int
) -> bool:
    """Return whether this rank's shards of the model are those that it held at the save.

    True if the checkpoint does not tell. Tensors that were whole on their ranks do not count.
    """
    records, names = metadata.shardings, sorted(source.names(MODEL))
    runs = records.parts.get(MODEL, []) if records is not None else []
    if records is None or sum(count for _, count in runs) != len(names):
        return True
    rules = [decode_rule(rule) for rule in records.rules]
    rule_numbers = (number for number, count in runs for _ in range(count))
    number_of = dict(zip(names, rule_numbers, strict=True))
    decls = [tensor.decl for tensor in state.tensors if tensor.decl.part == MODEL]
    specs = {decl.fqn: decl.spec for decl in decls if decl.fqn in number_of}
    by_name = group_by_value((decl.sharding, decl.fqn) for decl in decls)
    cases = {(number_of[fqn], (*by_name[fqn],), spec.shape) for fqn, spec in specs.items()}
    for number, current, shape in cases:
        saved, holders = rules[number]
        if saved.is_whole and all(sharding.is_whole for sharding in current):
            continue
        boxes, saved_boxes = (
            {box for sharding in shardings for box, _ in sharding.boxes(rank, shape)}
            for shardings in (current, [saved])
        )
        if rank not in holders or boxes != saved_boxes:
            return False
    return True
