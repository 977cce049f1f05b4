"""The checkpoint that several machines have between them, read as if it were one folder.

How wrong bytes could be read: a folder of another save with the same name is mixed in; a file is
there and damaged; a machine's folder is older than the others'. So only folders of one save id are
joined, and every block that is read is compared with its digest.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.folder.reader import Folder
from unified_ckpt.engine.nodes.coverage import ClusterIndex
from unified_ckpt.engine.nodes.folders import FolderCache
from unified_ckpt.engine.nodes.storage import ShardedStorage, virtual_file
from unified_ckpt.engine.source.protocol import Catalog, Location, SourceMetadata, read_box
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest


class ClusterSource:
    """The folders of one save on several machines, as a Source. `found`: proved to be complete;
    `own`: those that are on this machine.
    """

    def __init__(
        self, index: ClusterIndex, folders: FolderCache, *, local: Collection[int], rotation: int
    ) -> None:
        self._index, self._folders, self._local = index, folders, frozenset(local)
        count = len(index.folders)
        self._order = sorted(
            range(count), key=lambda number: (number not in local, (number + rotation) % count)
        )
        self.storage = ShardedStorage(index, folders, local=local, rotation=rotation, complete=True)
        self.storage.verification_log.damage.extend(index.lost)
        self._names: dict[str, dict[str, None]] = {}
        for part, name in index.specs:
            self._names.setdefault(part, {})[name] = None

    @property
    def format(self) -> str:
        return "unified"

    @property
    def parts(self) -> Sequence[str]:
        return sorted(self._names)

    def names(self, part: str) -> Collection[str]:
        return self._names.get(part, {}).keys()

    def aliases(self, part: str) -> Mapping[str, str]:
        return self._any_folder.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        return {name: self._index.specs[part, name] for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        return read_box(
            self.storage,
            Location(virtual_file((part, name)), 0),
            self._index.specs[part, name],
            box,
        )

    def catalog(self, keys: Collection[Key]) -> Catalog:
        return Catalog(
            self.storage,
            {key: Location(virtual_file(key), 0) for key in keys},
            self.storage.verification_log,
        )

    def block_digests(self, keys: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        self._any_folder.digest_record()
        return dict.fromkeys(keys)  # `storage` compares those of the pieces

    def metadata(self) -> SourceMetadata:
        """What the first folder says whose files are sound: all say the same of the whole."""
        errors: list[CheckpointError] = []
        for number in self._order:
            try:
                metadata = self._folders[number].metadata()
            except CheckpointError as error:
                errors.append(error)
                continue
            self.storage.verification_log.damage.extend(map(str, errors))
            return replace(metadata, rank_extras=self._index.rank_extras)
        raise errors[0]

    def rank_extra(self, rank: int) -> Any:
        errors: list[CheckpointError] = []
        for number in self._order:
            ranks = self._index.folders[number].ranks
            if rank not in ranks:
                continue
            try:
                rank_extra = self._folders[number].rank_extra(ranks.index(rank))
            except CheckpointError as error:
                errors.append(error)
                continue
            self.storage.verification_log.damage.extend(map(str, errors))
            return rank_extra
        if errors:
            raise errors[0]
        self.storage.verification_log.damage.append(
            f"rank_extra of rank {rank} is not given back: the folder that has it is on no machine here"
        )
        return None

    @property
    def save_id(self) -> str:
        return self._index.save_id

    @property
    def manifests(self) -> list[Manifest]:
        """Of all folders, in the order of `local_folders`. Opens each."""
        folders = sorted(
            (self._folders[number] for number in range(len(self._index.folders))), key=_folder_order
        )
        return [folder.manifest for folder in folders if folder.manifest is not None]

    @property
    def local_folders(self) -> list[Folder]:
        """The folders that lie on this machine, in the order of the islands that wrote them; copies
        of others after all of them.
        """
        return sorted((self._folders[number] for number in self._local), key=_folder_order)

    def local_nbytes(self, part: str, name: str) -> int:
        """About how many bytes of a tensor lie on this machine: a byte that it has in two boxes
        counts twice.
        """
        spec, layout = self._index.specs[part, name], self._index.layout((part, name))
        boxes = {box for number in self._local for box, _, _ in layout.boxes_in_folder(number)}
        return min(
            sum(box.numel for box in boxes) * spec.nbytes // max(full_box(spec.shape).numel, 1),
            spec.nbytes,
        )

    def close(self) -> None:
        self._folders.close()

    @property
    def _any_folder(self) -> Folder:
        """Any of them: they say the same of the whole."""
        return self._folders[self._order[0]]


def _folder_order(folder: Folder) -> tuple[bool, int]:
    node_group = folder.manifest.node_group if folder.manifest is not None else None
    parent = os.path.split(os.path.split(folder.storage.root)[0])[1]
    return parent == names.REPLICAS, node_group.number if node_group is not None else -1
