from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tests.support.harness import run_ranks
from unified_ckpt.core.nodes.node_groups import NodeGroup
from unified_ckpt.core.nodes.write_alignment import ANY_BYTE, WriteAlignment
from unified_ckpt.runtime.comm.comm import Comm, single_process
from unified_ckpt.runtime.comm.topology import Topology, file_system_type, gather_topology, node_id


def test_node_id_is_the_boot_id() -> None:
    assert node_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_file_system_type_of_any_mount_point(tmp_path: Path) -> None:
    """A type that is taken for that of the root may let two nodes write one page."""
    mountinfo = tmp_path / "mountinfo"
    mounts = {"/": "ext4", "/mnt/données": "nfs4", "/mnt/a b\\": "lustre", "/mnt/\udcff": "beegfs"}
    lines = [
        b"36 35 98:0 / %s rw,noatime master:1 - %s /dev/root rw\n"
        % (
            os.fsencode(point).replace(b"\\", b"\\134").replace(b" ", b"\\040"),
            fs_type.encode(),
        )
        for point, fs_type in mounts.items()
    ]
    mountinfo.write_bytes(b"".join(lines))
    for point, fs_type in mounts.items():
        assert file_system_type(f"{point}/run", str(mountinfo)) == fs_type
    assert file_system_type("/mnt/données-2", str(mountinfo)) == "ext4"


def test_single_process_is_one_node_and_one_group() -> None:
    single = gather_topology(single_process(), "load", timeout_seconds=1)
    assert (single.nodes, single.node_leaders, single.ranks_by_node) == ((0,), (0,), [[0]])
    assert single.node_group == NodeGroup(0, 1, (0,), 1)
    assert single.is_node_leader
    assert (single.spans_nodes, single.group_spans_nodes) == (False, False)
    assert single.write_alignment == WriteAlignment((0,), ANY_BYTE)


def test_nodes_are_numbered_by_their_first_ranks() -> None:
    several = Topology.shared_folder(2, ["b", "a", "b", "c", "a"])
    assert several.nodes == (0, 1, 0, 2, 1)
    assert (several.node_leaders, several.ranks_by_node) == ((0, 1, 3), [[0, 2], [1, 4], [3]])
    assert (several.node, several.local_world, several.is_node_leader) == (0, 2, False)
    assert several.spans_nodes
    assert several.group_spans_nodes


def test_node_group_has_its_own_alignment() -> None:
    """Ranks 2 to 4 share a folder; within the group they are ranks 0 to 2."""
    several = Topology.shared_folder(3, ["a", "a", "b", "c", "c"])
    topology = replace(several, node_group=NodeGroup(1, 2, (2, 3, 4), 5), alignment_nbytes=4096)
    assert topology.group_spans_nodes
    assert topology.write_alignment == WriteAlignment((1, 2, 2), 4096)
    assert not replace(several, node_group=NodeGroup(2, 3, (3, 4), 5)).group_spans_nodes


def test_gathered_topology_is_that_of_each_rank() -> None:
    def act(comm: Comm) -> Topology:
        return gather_topology(comm, "load of c", node=f"node {comm.rank // 2}", timeout_seconds=5)

    topologies = run_ranks(3, act)
    assert [topology.rank for topology in topologies] == [0, 1, 2]
    assert [topology.nodes for topology in topologies] == [(0, 0, 1)] * 3
