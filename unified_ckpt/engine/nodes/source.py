"""The checkpoint that several machines have between them, read as if it were one folder.

How wrong bytes could be read: a folder of another save with the same name is mixed in; a file is there and damaged; a machine's folder is
older than the others'. So only folders of one save id are joined, and every block that is read is compared with its digest.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unified_ckpt.core.sharding.boxes import Box, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.folder.reader import Folder
from unified_ckpt.engine.nodes.coverage import Whole
from unified_ckpt.engine.nodes.folders import Folders
from unified_ckpt.engine.nodes.storage import JointStorage, file_of
from unified_ckpt.engine.source.protocol import Catalog, Location, Said, read_box
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest


class Joint:
    """The folders of one save on several machines, as a Source. `found`: proved to be complete; `own`: those that are on this machine."""

    def __init__(self, found: Whole, folders: Folders, *, own: Collection[int], turn: int) -> None:
        self._found, self._folders, self._own = found, folders, frozenset(own)
        count = len(found.folders)
        self._order = sorted(
            range(count), key=lambda number: (number not in own, (number + turn) % count)
        )
        self.storage = JointStorage(found, folders, own=own, turn=turn, proved=True)
        self.storage.ledger.damage.extend(found.lost)
        self._names: dict[str, dict[str, None]] = {}
        for part, name in found.specs:
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
        return self._one.aliases(part)

    def specs(self, part: str, names: Collection[str]) -> Mapping[str, TensorSpec]:
        return {name: self._found.specs[part, name] for name in names}

    def read(self, part: str, name: str, box: Box) -> bytes:
        return read_box(
            self.storage, Location(file_of((part, name)), 0), self._found.specs[part, name], box
        )

    def catalog(self, wanted: Collection[Key]) -> Catalog:
        return Catalog(
            self.storage, {key: Location(file_of(key), 0) for key in wanted}, self.storage.ledger
        )

    def block_digests(self, wanted: Collection[Key]) -> Mapping[Key, Sequence[int] | None]:
        self._one.proof()
        return dict.fromkeys(wanted)  # `storage` compares those of the pieces

    def said(self) -> Said:
        """What the first folder says whose files are sound: all say the same of the whole."""
        errors: list[CheckpointError] = []
        for number in self._order:
            try:
                said = self._folders[number].said()
            except CheckpointError as error:
                errors.append(error)
                continue
            self.storage.ledger.damage.extend(map(str, errors))
            return replace(said, rank_extras=self._found.rank_extras)
        raise errors[0]

    def rank_extra(self, rank: int) -> Any:
        errors: list[CheckpointError] = []
        for number in self._order:
            ranks = self._found.folders[number].ranks
            if rank not in ranks:
                continue
            try:
                found = self._folders[number].rank_extra(ranks.index(rank))
            except CheckpointError as error:
                errors.append(error)
                continue
            self.storage.ledger.damage.extend(map(str, errors))
            return found
        if errors:
            raise errors[0]
        self.storage.ledger.damage.append(
            f"rank_extra of rank {rank} is not given back: the folder that has it is on no machine here"
        )
        return None

    @property
    def save_id(self) -> str:
        return self._found.save_id

    @property
    def manifests(self) -> list[Manifest]:
        """Of all folders, in the order of `here`. Opens each."""
        every = sorted(
            (self._folders[number] for number in range(len(self._found.folders))), key=_turn
        )
        return [folder.manifest for folder in every if folder.manifest is not None]

    @property
    def here(self) -> list[Folder]:
        """The folders that lie on this machine, in the order of the islands that wrote them; copies of others after all of them."""
        return sorted((self._folders[number] for number in self._own), key=_turn)

    def nbytes_here(self, part: str, name: str) -> int:
        """About how many bytes of a tensor lie on this machine: a byte that it has in two boxes counts twice."""
        spec, family = self._found.specs[part, name], self._found.family((part, name))
        boxes = {box for number in self._own for box, _, _ in family.of_folder(number)}
        return min(
            sum(box.numel for box in boxes) * spec.nbytes // max(whole(spec.shape).numel, 1),
            spec.nbytes,
        )

    def close(self) -> None:
        self._folders.close()

    @property
    def _one(self) -> Folder:
        """Any of them: they say the same of the whole."""
        return self._folders[self._order[0]]


def _turn(folder: Folder) -> tuple[bool, int]:
    island = folder.manifest.island if folder.manifest is not None else None
    parent = os.path.split(os.path.split(folder.storage.root)[0])[1]
    return parent == names.REPLICAS, island.number if island is not None else -1
