"""What a disk may hold after a power cut, given what happened before (`journal.py`).

Bytes: each 4 KiB page that was written since its file was synced is there or not, alone, and so is
the file's length. A page that is not there has its earlier bytes, or zeros.

Names, one of two models for each cut:
- ordered, as in ext4 and XFS: changes of names survive up to some moment. The sync of a file or
  folder includes every change before its own last one.
- weak, what POSIX promises: each change survives alone, in each folder, unless that folder was
  synced. A rename within a folder is one change. A rename to another folder is one in each; of
  those, the removal of the old name survives only with the new name, unless it was synced alone.

Some folders at the top are spared: they are on machines that keep their power.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.power.journal import TOP, Entry, Journal, Named, Reported, Synced, Written

PAGE = 4096
SPARED = 0.2  # of the folders at the top, which may be on other machines
# Path -> bytes of a file, None for a folder, the target of a link. A folder precedes its entries.
Tree = dict[str, bytes | str | None]
_Names = dict[int, dict[str, int]]  # by folder


@dataclass(slots=True, eq=False)
class _Change:
    """The part in one folder of a change of names."""

    folder: int
    names: dict[str, int | None]
    needs: _Change | None = None  # the new name, if the old one was in this folder
    durable: bool = False


class Disk:
    """A disk on which the entries of a journal happen one after another."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._bodies: dict[int, list[bytes]] = {}  # since the last sync, oldest first
        self._changes: list[_Change] = []
        self._ordered: list[Named] = []
        self._ordered_durable = 0  # so many of them
        self.reported: list[Any] = []

    def apply(self, entry: Entry) -> None:
        """Do what an entry of the journal says."""
        match entry:
            case Written(file, body):
                self._bodies.setdefault(file, [b""]).append(body)
            case Named():
                self._ordered.append(entry)
                self._changes += _by_folder(entry)
            case Synced(number):
                self._sync(number)
            case Reported(value):
                self.reported.append(value)

    def _sync(self, number: int) -> None:
        if number in self._bodies:
            del self._bodies[number][:-1]
        for change in self._changes:
            change.durable |= change.folder == number
        for index in range(self._ordered_durable, len(self._ordered)):
            if any(number in (folder, child) for folder, _, child in self._ordered[index].names):
                self._ordered_durable = index + 1

    def cut(self, draw: random.Random, *, spared: Collection[str] | None = None) -> Tree:
        """Draw what is there after a power cut now.

        `spared`: the folders at the top that are spared; drawn too by default.
        """
        names = self._no_names()
        survives = _chooser(draw)
        if draw.random() < 0.5:
            kept = list[_Change]()
            for change in self._changes:
                needs_kept = change.needs is None or change.needs in kept
                if change.durable or (survives() and needs_kept):
                    kept.append(change)
                    _rename(names[change.folder], change.names)
        else:
            pending = len(self._ordered) - self._ordered_durable
            count = sum(survives() for _ in range(pending))
            for named in self._ordered[: self._ordered_durable + count]:
                for change in _by_folder(named):
                    _rename(names[change.folder], change.names)
        return self._tree(draw, names, spared)

    def _no_names(self) -> _Names:
        return {folder: {} for folder in self._journal.folders}

    def _tree(self, draw: random.Random, names: _Names, spared: Collection[str] | None) -> Tree:
        """Return the tree with these names, and the `spared` folders as they are now."""
        tree: Tree = {}
        uncut = self._no_names()
        for change in self._changes:
            _rename(uncut[change.folder], change.names)
        if spared is None:
            spared = [name for name in sorted(uncut[TOP]) if draw.random() < SPARED]

        def add(path: str, number: int, names: _Names, draw: random.Random | None) -> None:
            if number in self._journal.links:
                tree[path] = self._journal.links[number]
            elif number in self._journal.folders:
                tree[path] = None
                for name, child in sorted(names[number].items()):
                    if path or name not in spared:
                        add(f"{path}/{name}" if path else name, child, names, draw)
            else:
                bodies = self._bodies.get(number, [b""])
                tree[path] = bodies[-1] if draw is None else _draw_body(draw, bodies)

        add("", TOP, names, draw)
        for name in spared:
            add(name, uncut[TOP][name], uncut, None)
        return tree


def _by_folder(named: Named) -> list[_Change]:
    """Split a change of names by folder, a removal after what it needs."""
    changes: dict[int, _Change] = {}
    for folder, name, number in reversed(named.names):
        changes.setdefault(folder, _Change(folder, {})).names[name] = number
    first, *rest = changes.values()
    for change in rest:
        change.needs = first
    return [first, *rest]


def _rename(names: dict[str, int], change: dict[str, int | None]) -> None:
    for name, number in change.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


def _chooser(draw: random.Random) -> Callable[[], bool]:
    """Return a function that draws whether something survives: all, nothing, or some of it."""
    share = draw.choice((0.0, 1.0, draw.random()))
    return lambda: draw.random() < share


def _draw_body(draw: random.Random, bodies: Sequence[bytes]) -> bytes:
    """Draw what is left of a file from its versions since the last sync."""
    kind = draw.choice(("old", "new", "length", "pages")) if len(bodies) > 1 else "new"
    if kind in ("old", "new"):
        return bodies[0 if kind == "old" else -1]
    nbytes = len(bodies[-1]) if kind == "length" else len(draw.choice(bodies))
    left = bytearray(nbytes)
    for start in range(0, nbytes, PAGE):
        page = draw.choice(bodies if kind == "pages" else bodies[:1])[start : start + PAGE]
        left[start : start + len(page)] = page[: nbytes - start]
    return bytes(left)


def write_tree(tree: Tree, root: Path) -> None:
    """Create the files, folders and links of a tree. `root` exists and is empty."""
    for name, content in tree.items():
        path = os.path.join(root, name)
        if content is None:
            os.makedirs(path, exist_ok=True)
        elif isinstance(content, str):
            os.symlink(content, path)
        else:
            with open(path, "wb") as file:
                file.write(content)
