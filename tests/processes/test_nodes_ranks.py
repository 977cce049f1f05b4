"""Nodes as separate folders under torchrun, and as network namespaces: real FSDP2 and TP, saved
here and loaded there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.processes.launch import HERE, environment, torchrun
from tests.support.processes.merged import read_merged

CHECKPOINT = "checkpoint-1"


def run(
    root: Path, what: str, world: int, per_node: int, folders: Sequence[str], **options: object
) -> None:
    tag = f"{what}-{world}-{per_node}-{random.randrange(1 << 30)}"
    more = [item for name, value in options.items() for item in told(f"--{name}", value)]
    arguments = [
        what,
        root,
        "--tag",
        tag,
        "--per-node",
        per_node,
        "--folders",
        ",".join(folders),
        *more,
    ]
    torchrun(world, "worker_nodes.py", *arguments, timeout_seconds=150)
    for rank in range(world):
        assert json.loads((root / f"{tag}-{rank}.json").read_text()) == []


def told(name: str, value: object) -> list[object]:
    if isinstance(value, bool):
        return [name] * value
    return [name, *value] if isinstance(value, list) else [name, value]


def places(root: Path, count: int) -> list[str]:
    return [str(root / f"node-{node}" / CHECKPOINT) for node in range(count)]


@pytest.mark.parametrize(
    ("layout", "background"),
    [
        ("fsdp_tp", False),
        ("fsdp", True),
        pytest.param("fsdp", False, marks=pytest.mark.long),
        pytest.param("fsdp_tp", True, marks=pytest.mark.slow),
    ],
)
def test_two_nodes_of_two_ranks(tmp_path: Path, layout: str, background: bool) -> None:
    """Saved twice; loaded where it was, with the folders swapped, by fewer ranks, by one with a
    list, by more nodes than there were.
    """
    one, two = places(tmp_path, 2)
    run(tmp_path, "save", 4, 2, [one, two], layout=layout, background=background, steps=[6, 7])
    assert sorted(path.name for path in tmp_path.glob("node-*/*")) == [CHECKPOINT] * 2
    assert any(Path(one).glob("*_shards*.safetensors")), "nothing is split over nodes"
    run(tmp_path, "load", 1, 1, [f"{two}:{one}"], layout=layout, steps=[7])
    run(tmp_path, "load", 4, 2, [two, one], layout=layout, steps=[7])
    if layout == "fsdp":
        run(tmp_path, "load", 2, 1, [one, two], layout=layout, steps=[7])
        run(
            tmp_path,
            "load",
            4,
            1,
            [two, str(tmp_path / "none"), one, str(tmp_path / "none")],
            layout=layout,
            steps=[7],
        )


@pytest.mark.parametrize(("layout", "background"), [("fsdp_tp", True), ("fsdp", False)])
def test_two_nodes_of_two_ranks_and_one_folder(
    tmp_path: Path, layout: str, background: bool
) -> None:
    """One merged checkpoint, as from one node; loaded by two nodes, and by one process."""
    folder = str(tmp_path / "shared" / CHECKPOINT)
    run(
        tmp_path,
        "save",
        4,
        2,
        [folder, folder],
        layout=layout,
        background=background,
        alignment=4096,
        steps=[6, 7],
    )
    assert os.listdir(tmp_path / "shared") == [CHECKPOINT]
    assert not any(Path(folder).glob("*_shards*"))
    assert {"up.weight", "down.weight/exp_avg"} <= read_merged(Path(folder)).keys()
    run(tmp_path, "load", 1, 1, [folder], layout=layout, steps=[7])
    run(tmp_path, "load", 4, 2, [folder, folder], layout=layout, steps=[7])


# a node is killed


def agent(
    root: Path,
    node: int,
    port: int,
    folders: Sequence[str],
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
    **options: object,
) -> subprocess.Popen[str]:
    """torchrun of one of two nodes of two ranks."""
    what, tag = options.pop("what"), options.pop("tag", "agent")
    more = [str(item) for name, value in options.items() for item in told(f"--{name}", value)]
    command = [
        *prefix,
        sys.executable,
        "-m",
        "torch.distributed.run",
        *(
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            "--node-rank",
            str(node),
            "--master-addr",
            host,
            "--master-port",
            str(port),
        ),
        str(HERE / "worker_nodes.py"),
        *(
            str(what),
            str(root),
            "--tag",
            str(tag),
            "--per-node",
            "2",
            "--folders",
            ",".join(folders),
            *more,
        ),
    ]
    output = (root / f"{tag}-{node}.txt").open("w")
    with output:
        return subprocess.Popen(
            command,
            env=environment() | {"WORKER_TIMEOUT_SECONDS": "110"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def said(root: Path, tag: str) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text()}" for path in sorted(root.glob(f"{tag}-*.txt"))
    )


def end(children: Sequence[subprocess.Popen[str]]) -> None:
    """Each agent is the leader of a session of its own: its workers are in it."""
    for child in children:
        for pid in workers(child.pid):
            os.kill(pid, signal.SIGKILL)
        if child.poll() is None:
            child.kill()
        child.wait(30)


def workers(pid: int) -> list[int]:
    """Children and theirs."""
    found: list[int] = []
    try:
        own = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return found
    for one in own:
        found += [one, *workers(one)]
    return found


SEEDS = [
    0,
    pytest.param(1, marks=pytest.mark.slow),
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_is_killed_while_all_save(tmp_path: Path, seed: int) -> None:
    """The other one's ranks end with an error; one whole save is there, the last that a rank has
    told of or a later one.
    """
    folders, port = places(tmp_path, 2), free_port()
    children = [
        agent(tmp_path, node, port, folders, what="forever", tag="forever") for node in (0, 1)
    ]
    try:
        deadline = time.monotonic() + 90
        while "saved 3" not in said(tmp_path, "forever"):
            assert all(child.poll() is None for child in children), said(tmp_path, "forever")
            assert time.monotonic() < deadline, said(tmp_path, "forever")
            time.sleep(0.02)
        time.sleep(random.Random(seed).uniform(0, 0.5))
        for pid in [*workers(children[1].pid), children[1].pid]:
            os.kill(pid, signal.SIGKILL)
        reached = max(
            int(word)
            for word in said(tmp_path, "forever").replace("saved", " ").split()
            if word.isdecimal() and int(word) < 10_000
        )
        assert children[0].wait(60) != 0
    finally:
        end(children)
    assert "CheckpointError" in said(tmp_path, "forever") or "RankError" in said(
        tmp_path, "forever"
    )
    run(tmp_path, "load", 1, 1, [":".join(folders)], steps=list(range(reached, reached + 200)))


# nodes as network namespaces


def namespaces() -> str:
    """Why two namespaces cannot be joined here; empty where they can."""
    if (
        shutil.which("ip") is None
        or shutil.which("unshare") is None
        or shutil.which("nsenter") is None
    ):
        return "needs ip, unshare and nsenter"
    probe = (
        "ip link add v0 type veth peer name v1 && ip addr add 10.77.0.1/24 dev v0 && "
        "unshare -n true"
    )
    found = subprocess.run(
        ["unshare", "-rn", "sh", "-c", probe],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return (
        ""
        if found.returncode == 0
        else f"no network namespaces here: {found.stderr.strip() or found.returncode}"
    )


SETUP = """
set -e
mount -t tmpfs none /run 2>/dev/null || true
unshare -n sleep 300 & other=$!
sleep 0.3
ip link set lo up
ip link add v0 type veth peer name v1
ip link set v1 netns $other
ip addr add 10.77.0.1/24 dev v0
ip link set v0 up
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev v1; ip link set v1 up'
sleep 0.2
GLOO_SOCKET_IFNAME=v0 {first} > {root}/{tag}-0.txt 2>&1 & one=$!
GLOO_SOCKET_IFNAME=v1 nsenter -t $other -n {second} > {root}/{tag}-1.txt 2>&1 & two=$!
code=0
wait $one || code=1
wait $two || code=1
kill $other
exit $code
"""


def in_namespaces(
    root: Path,
    tag: str,
    what: str,
    folders: Sequence[str],
    *,
    master: str = "10.77.0.1",
    hosts: str = "",
    more: str = "",
) -> None:
    """Two agents of torchrun, each in a network of its own: nothing of one is reached at the
    other's loopback address.
    """
    arguments = (
        f"{what} {root} --tag {tag} --per-node 2 --folders {','.join(folders)} --steps 5 {more}"
    )
    common = (
        f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 "
        f"--master-addr {master} --master-port 29511"
    )
    one, two = (
        f"{common} --node-rank {node} {HERE / 'worker_nodes.py'} {arguments}" for node in (0, 1)
    )
    if hosts:  # the first node's own name is a loopback address in its /etc/hosts, as Debian has it
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {master}"]
        (root / "hosts-0").write_text("\n".join(lines) + "\n")
        (root / "hosts-1").write_text(f"127.0.0.1 localhost\n10.77.0.1 {master}\n")
        one, two = (
            f"unshare -m sh -c 'mount --bind {root}/hosts-{i} /etc/hosts && exec {command}'"
            for i, command in enumerate((one, two))
        )
    script = SETUP.format(first=one, second=two, root=root, tag=tag)
    env = environment() | {"WORKER_TIMEOUT_SECONDS": "60"}
    found = subprocess.run(
        ["unshare", "-rnm", "--kill-child", "--fork", "--pid", "--mount-proc", "sh", "-c", script],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert found.returncode == 0, found.stderr + said(root, tag)
    for rank in range(4):
        assert json.loads((root / f"{tag}-{rank}.json").read_text()) == []


def test_two_network_namespaces(tmp_path: Path) -> None:
    """Each node has the other's folder at the load: every byte goes over the wire."""
    why = namespaces()
    if why:
        pytest.skip(why)
    one, two = places(tmp_path, 2)
    in_namespaces(tmp_path, "save", "save", [one, two])
    shutil.move(Path(two).parent, tmp_path / "moved")
    in_namespaces(
        tmp_path,
        "load",
        "load",
        [str(tmp_path / "none" / CHECKPOINT), f"{one}:{tmp_path / 'moved' / CHECKPOINT}"],
    )
    folder = str(tmp_path / "shared" / CHECKPOINT)
    in_namespaces(tmp_path, "save-shared", "save", [folder, folder], more="--alignment 4096")
    in_namespaces(tmp_path, "load-shared", "load", [folder, folder])
