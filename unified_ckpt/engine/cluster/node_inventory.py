"""What the folders on one node hold of a save: its own, those beside it, and replicas of others.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from unified_ckpt.engine.cluster.coverage import missing_of_save, select_save
from unified_ckpt.engine.cluster.inventory import Inventory, read_inventory
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.storage import LocalStorage


def read_node_inventories(
    folders: Sequence[Folder], paths: Sequence[str], *, node: int
) -> tuple[list[Inventory], list[str]]:
    """Return what this node has of the checkpoint at some paths, and what is wrong with the rest.

    `folders`: those of the paths that could be opened; the ones without a manifest are ignored.
    """
    problems, adjacent, replicas = list[str](), list[Folder](), list[Folder]()
    try:
        for path in paths:
            parent, name = os.path.split(path)
            # A save that stopped between the renames of several nodes leaves them.
            adjacent += _node_group_folders(parent, partial(names.is_sibling, name=name))[0]
            opened, replica_problems = _node_group_folders(os.path.join(path, names.REPLICAS))
            replicas += opened
            problems += replica_problems
        for folder in adjacent:  # a crash may have interrupted their replicas: no problem
            replicas += _node_group_folders(os.path.join(folder.storage.root, names.REPLICAS))[0]
        inventories = [
            read_inventory(folder, node=node, is_replica=False)
            for folder in (*folders, *adjacent)
            if folder.manifest is not None
        ]
        inventories += [read_inventory(folder, node=node, is_replica=True) for folder in replicas]
    finally:
        for folder in (*adjacent, *replicas):
            folder.close()
    return inventories, problems


def missing_from_node(folder: Folder) -> str:
    """Return what this node lacks to load the checkpoint in `folder`, "" if it has everything.

    Reads manifests and headers.
    """
    if not folder.is_node_folder or not isinstance(folder.storage, LocalStorage):
        return ""
    path, save_id = folder.storage.root, folder.manifest.save_id if folder.manifest else ""
    inventories, problems = read_node_inventories([folder], [path], node=0)
    missing = missing_of_save([item for item in inventories if item.save_id == save_id])
    if missing:
        return missing[0]
    selected = select_save(inventories, label=path, damaged=problems).save_id
    return "" if selected == save_id else another_save_text(selected, save_id)


def another_save_text(actual: str | None, expected: str | None) -> str:
    """Say that a load of a name would read another save than the one listed."""
    return f"got another save of this name, {actual}, expected {expected}"


def _node_group_folders(
    parent: str, is_wanted: Callable[[str], bool] = lambda _: True
) -> tuple[list[Folder], list[str]]:
    """Return the complete folders of node groups below a folder, and what is wrong with others."""
    storage, folders, problems = LocalStorage(parent), list[Folder](), list[str]()
    for entry in filter(is_wanted, storage.names() if storage.kind("") == "folder" else ()):
        try:
            folder = open_folder(LocalStorage(storage.path(entry)))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if folder.manifest is not None and folder.manifest.node_group is not None:
            folders.append(folder)
        else:
            problems.append(
                f"{folder.storage.root}: has no {names.MANIFEST} of a node's folder, "
                "expected a replica of one"
            )
    return folders, problems
