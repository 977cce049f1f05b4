"""A checkpoint in the folders of several nodes, as one Source.

Wrong bytes could come from a folder of another save with the same name, from a damaged file or
from an outdated folder. Only folders with one save id are joined, and every block that is read
is verified.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.coverage import ClusterIndex
from unified_ckpt.engine.cluster.folders import FolderCache
from unified_ckpt.engine.cluster.storage import ShardReader
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.source.protocol import ReadPolicy, Source, SourceMetadata
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names as format_names
from unified_ckpt.format.codec import Path
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.format.manifest_fields import EncodingRecord
from unified_ckpt.runtime.storage.protocol import Buffer

_Result = TypeVar("_Result")


class ClusterSource(Source):
    """The folders of one save on several nodes, as a Source.

    `index` is complete; `local`: the numbers of this node's folders.
    """

    def __init__(
        self,
        index: ClusterIndex,
        folders: FolderCache,
        *,
        local: Collection[int],
        rotation: int,
        policy: ReadPolicy,
    ) -> None:
        self._index, self._folders, self._local = index, folders, frozenset(local)
        count = len(index.folders)
        self._order = sorted(
            range(count), key=lambda number: (number not in local, (number + rotation) % count)
        )
        self._reader = ShardReader(
            index, folders, local=local, rotation=rotation, complete=True, policy=policy
        )
        self.format, self.verification = "unified", self._reader.verification
        self.verification.damage.extend(index.problems)
        names_by_part = group_by_value((name, part) for part, name in index.specs)
        self._names = {part: dict.fromkeys(names) for part, names in names_by_part.items()}

    @property
    def parts(self) -> Sequence[str]:
        """The parts of the save, sorted."""
        return sorted(self._names)

    def names(self, part: str) -> Collection[str]:
        """Return the tensors of a part."""
        return self._names.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        """Return other names of tied tensors."""
        return self._any_folder.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        """Return dtype and shape of some tensors."""
        return {name: self._index.specs[part, name] for name in names}

    def read_into(self, key: Key, start: int, buffer: Buffer) -> None:
        """Fill `buffer` from byte `start` of a tensor, from the folders that have the bytes."""
        self._reader.read_into(key, start, buffer)

    def encodings(self) -> Mapping[str, Mapping[str, EncodingRecord]]:
        """Return how some tensors are encoded: the same in all folders."""
        manifest = self._any_folder.manifest
        parts = manifest.parts if manifest is not None else {}
        return {
            part: record.encodings
            for part, record in parts.items()
            if record.encodings and part in self._names
        }

    def outliers(self, part: str) -> bytes | None:
        """Return a part's outliers file, from a folder that has it intact."""
        return self._read_first(self._order, lambda number: self._folders[number].outliers(part))

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        """Return None for each tensor: digests are of shards, which `read_into` verifies."""
        self._any_folder.digest_record()
        return dict.fromkeys(keys)

    def metadata(self) -> SourceMetadata:
        """Return the metadata of the first readable folder; all folders have the same."""
        metadata = self._read_first(self._order, lambda number: self._folders[number].metadata())
        return replace(metadata, rank_extras=self._index.rank_extras)

    def rank_extra(self, rank: int) -> Any:
        """Return the `rank_extra` of a saving rank, from a folder that has it."""
        ranks = [folder.ranks for folder in self._index.folders]
        numbers = [number for number in self._order if rank in ranks[number]]
        if not numbers:
            self.verification.damage.append(
                f"rank_extra of rank {rank} is not restored: no node present has its folder"
            )
            return None
        return self._read_first(
            numbers, lambda number: self._folders[number].rank_extra(ranks[number].index(rank))
        )

    def rank_values(self, entry: int) -> Sequence[tuple[Path, Any]]:
        """Return the values of an entry, which all folders have."""
        return self._read_first(
            self._order, lambda number: self._folders[number].rank_values(entry)
        )

    def _read_first(self, numbers: Sequence[int], read: Callable[[int], _Result]) -> _Result:
        """Return what `read` returns for the first folder that it can read; note the others."""
        errors: list[CheckpointError] = []
        for number in numbers:
            try:
                result = read(number)
            except CheckpointError as error:
                errors.append(error)
                continue
            self.verification.damage.extend(map(str, errors))
            return result
        raise errors[0]

    @property
    def save_id(self) -> str:
        """The id of the save."""
        return self._index.save_id

    @property
    def manifests(self) -> list[Manifest]:
        """The manifests of all folders, in the order of `local_folders`. Opens each folder."""
        folders = sorted(
            (self._folders[number] for number in range(len(self._index.folders))), key=_folder_order
        )
        return [folder.manifest for folder in folders if folder.manifest is not None]

    @property
    def local_folders(self) -> list[Folder]:
        """This node's folders, in the order of node groups; replicas come last."""
        return sorted((self._folders[number] for number in self._local), key=_folder_order)

    def local_nbytes(self, part: str, name: str) -> int:
        """Estimate how many bytes of a tensor are on this node; overlaps count twice."""
        spec, layout = self._index.specs[part, name], self._index.layout((part, name))
        boxes = {box for number in self._local for box, _, _ in layout.boxes_in_folder(number)}
        numel = max(full_box(spec.shape).numel, 1)
        return min(sum(box.numel for box in boxes) * spec.nbytes // numel, spec.nbytes)

    def close(self) -> None:
        """Close all folders."""
        self._folders.close()

    @property
    def _any_folder(self) -> Folder:
        """The preferred folder; all have the same aliases and kind of digests."""
        return self._folders[self._order[0]]


def _folder_order(folder: Folder) -> tuple[bool, int]:
    """Sort folders by node group, replicas last."""
    node_group = folder.manifest.node_group if folder.manifest is not None else None
    parent = os.path.split(os.path.split(folder.storage.root)[0])[1]
    return parent == format_names.REPLICAS, node_group.number if node_group is not None else -1
