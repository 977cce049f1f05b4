"""Nodes as separate folders under torchrun, and as network namespaces: real FSDP2 and TP jobs save
and load.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.processes import warm
from tests.support.processes.launch import PROGRAMS, environment, torchrun
from tests.support.processes.merged import read_merged

CHECKPOINT = "checkpoint-1"


def call(what: str, per_node: int, *folders: str, **options: object) -> dict[str, object]:
    """A call of the worker. `folders`: of the nodes; those of one by colons."""
    more = {"layout": "fsdp", "steps": [7], **options}
    return {"what": what, "per_node": per_node, "folders": folders, **more}


def written(root: Path, *calls: dict[str, object]) -> Path:
    path = root / f"calls-{len(list(root.glob('calls-*')))}.json"
    path.write_text(json.dumps(calls))
    return path


def run(root: Path, world: int, *calls: dict[str, object]) -> None:
    torchrun(world, "worker_nodes.py", written(root, *calls), timeout_seconds=150)


def places(root: Path, count: int) -> list[str]:
    return [str(root / f"node-{node}" / CHECKPOINT) for node in range(count)]


@pytest.mark.parametrize(
    ("layout", "background"),
    [
        pytest.param("fsdp_tp", False, marks=pytest.mark.integration),
        ("fsdp", True),
        pytest.param("fsdp", False, marks=pytest.mark.long),
        pytest.param("fsdp_tp", True, marks=pytest.mark.slow),
    ],
)
def test_two_nodes_of_two_ranks(tmp_path: Path, layout: str, background: bool) -> None:
    """Saved twice. Loaded with the folders swapped, by one rank with a list, and by more nodes."""
    first, second = places(tmp_path, 2)
    none = str(tmp_path / "none")
    loads = [call("load", 2, second, first, layout=layout)]
    if layout == "fsdp":
        loads.append(call("load", 1, second, none, first, none))
    save = call("save", 2, first, second, layout=layout, background=background, steps=[6, 7])
    run(tmp_path, 4, save, *loads)
    assert sorted(path.name for path in tmp_path.glob("node-*/*")) == [CHECKPOINT] * 2
    assert any(Path(first).glob("*_shards*.safetensors")), "nothing is split over nodes"
    run(tmp_path, 1, call("load", 1, f"{second}:{first}"))


@pytest.mark.integration
@pytest.mark.parametrize(("layout", "background"), [("fsdp_tp", True), ("fsdp", False)])
def test_two_nodes_of_two_ranks_and_one_folder(
    tmp_path: Path, layout: str, background: bool
) -> None:
    """One merged checkpoint, as from one node; loaded by two nodes, and by one process."""
    folder = str(tmp_path / "shared" / CHECKPOINT)
    options = {"background": background, "alignment": 4096, "steps": [6, 7]}
    save = call("save", 2, folder, folder, layout=layout, **options)
    run(tmp_path, 4, save, call("load", 2, folder, folder, layout=layout))
    assert os.listdir(tmp_path / "shared") == [CHECKPOINT]
    assert not any(Path(folder).glob("*_shards*"))
    assert {"up.weight", "down.weight/exp_avg"} <= read_merged(Path(folder)).keys()
    run(tmp_path, 1, call("load", 1, folder))


# a node is killed


LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")


def agent(root: Path, node: int, port: int, calls: Path) -> subprocess.Popen[str]:
    """Start torchrun for one of two nodes of two ranks."""
    place = ("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port))
    worker = warm.python(PROGRAMS / "worker_nodes.py", environment())  # ends with its client
    with (root / f"agent-{node}.txt").open("w") as output:
        return subprocess.Popen(
            [*LAUNCH, *place, "--no-python", *worker, str(calls)],
            env=environment() | {"WORKER_TIMEOUT_SECONDS": "110"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outputs(root: Path) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text()}" for path in sorted(root.glob("agent-*.txt"))
    )


def end(children: Sequence[subprocess.Popen[str]]) -> None:
    """Kill each agent with its workers; an agent leads a session of its own."""
    for child in children:
        for pid in workers(child.pid):
            os.kill(pid, signal.SIGKILL)
        if child.poll() is None:
            child.kill()
        child.wait(30)


def workers(pid: int) -> list[int]:
    """Pids of all descendants."""
    pids: list[int] = []
    try:
        children = [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return pids
    for child in children:
        pids += [child, *workers(child)]
    return pids


SEEDS = [
    0,
    pytest.param(1, marks=pytest.mark.slow),
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6)),
]


@pytest.mark.integration
@pytest.mark.parametrize("seed", SEEDS)
def test_node_is_killed_during_a_save(tmp_path: Path, seed: int) -> None:
    """The other node's ranks raise an error. One whole save remains: the last step that a rank
    printed, or a later one.
    """
    folders, port = places(tmp_path, 2), free_port()
    calls = written(tmp_path, call("forever", 2, *folders))
    children = [agent(tmp_path, node, port, calls) for node in (0, 1)]
    try:
        deadline = time.monotonic() + 90
        while "saved 3" not in outputs(tmp_path):
            assert all(child.poll() is None for child in children), outputs(tmp_path)
            assert time.monotonic() < deadline, outputs(tmp_path)
            time.sleep(0.02)
        time.sleep(random.Random(seed).uniform(0, 0.5))
        for pid in [*workers(children[1].pid), children[1].pid]:
            os.kill(pid, signal.SIGKILL)
        reached = max(
            int(word)
            for word in outputs(tmp_path).replace("saved", " ").split()
            if word.isdecimal() and int(word) < 10_000
        )
        assert children[0].wait(60) != 0
    finally:
        end(children)
    assert "CheckpointError" in outputs(tmp_path) or "RankError" in outputs(tmp_path)
    steps = list(range(reached, reached + 200))
    run(tmp_path, 1, call("load", 1, ":".join(folders), steps=steps))


# nodes as network namespaces


def namespaces(*, shaping: bool = False) -> str:
    """Return why two namespaces cannot be joined on this machine; empty if they can.

    `shaping`: whether one of their networks must be slow.
    """
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return "needs ip, unshare and nsenter"
    probe = (
        "ip link add v0 type veth peer name v1 && ip addr add 10.77.0.1/24 dev v0 && "
        f"unshare -n true && ({SHAPE.format(link='v0')} || {str(not shaping).lower()})"
    )
    unshare = subprocess.run(
        ["unshare", "-rn", "sh", "-c", probe],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return unshare.returncode * f"no network namespaces here: {unshare.stderr.strip()}"


SHAPE = "tc qdisc add dev {link} root tbf rate 40mbit burst 64kb latency 400ms"
SETUP = f"""
set -e
mount -t tmpfs none /run 2>/dev/null || true
unshare -n sleep 300 & other=$!
sleep 0.3
ip link add slow type veth peer name slow netns $other
ip link add fast type veth peer name fast netns $other
configure='ip link set lo up
ip addr add 10.77.0.$node/24 dev slow
ip addr add 10.78.0.$node/24 dev fast
ip link set slow up
ip link set fast up
{SHAPE.format(link="slow")} || true'
node=1 sh -c "$configure"
node=2 nsenter -t $other -n sh -c "$configure"
sleep 0.2
"""
RUN = """
{first} > {root}/agent-0.txt 2>&1 & one=$!
nsenter -t $other -n {second} > {root}/agent-1.txt 2>&1 & two=$!
code=0
wait $one || code=1
wait $two || code=1
cat /proc/net/dev
kill $other
exit $code
"""


def in_namespaces(root: Path, interface: str, *calls: dict[str, object]) -> dict[str, int]:
    """Run two torchrun agents, each in its own network namespace. Neither reaches the other's
    loopback address. Their store is on the slow network; `interface` is what Gloo uses.

    Returns how many bytes each interface of the first received.
    """
    tail = f"{PROGRAMS / 'worker_nodes.py'} {written(root, *calls)}"
    place = "--master-addr 10.77.0.1 --master-port 29511"
    first, second = (f"{' '.join(LAUNCH)} {place} --node-rank {node} {tail}" for node in (0, 1))
    script = SETUP + RUN.format(first=first, second=second, root=root)
    ended = subprocess.run(
        ["unshare", "-rnm", "--kill-child", "--fork", "--pid", "--mount-proc", "sh", "-c", script],
        check=False,
        env=environment() | {"WORKER_TIMEOUT_SECONDS": "60", "GLOO_SOCKET_IFNAME": interface},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr + outputs(root)
    counters = (line.split() for line in ended.stdout.splitlines() if ":" in line)
    return {name.rstrip(":"): int(received) for name, received, *_ in counters}


@pytest.mark.integration
def test_two_network_namespaces(tmp_path: Path) -> None:
    """One node has all folders at the last load, so each byte of the other travels over TCP."""
    if why := namespaces():
        pytest.skip(why)
    first, second = places(tmp_path, 2)
    folder = str(tmp_path / "shared" / CHECKPOINT)
    save_shared = call("save", 2, folder, folder, alignment=4096)
    in_namespaces(
        tmp_path,
        "fast",
        call("save", 2, first, second),
        save_shared,
        call("load", 2, folder, folder),
        call("load", 2, str(tmp_path / "none" / CHECKPOINT), f"{first}:{second}"),
    )


@pytest.mark.integration
def test_named_interface_carries_the_bytes(tmp_path: Path) -> None:
    """torchft#329: Gloo was told the fast network, and the checkpoint took the slow one, for 800 s.
    The master is on the slow network here. The report names what was used, and how fast it was.
    """
    if why := namespaces(shaping=True):
        pytest.skip(why)
    rates = {}
    for interface, subnet in (("fast", "10.78.0"), ("slow", "10.77.0")):
        root = tmp_path / interface
        folder = str(root / "shared" / CHECKPOINT)
        (root / "shared").mkdir(parents=True)
        save = call("save", 2, folder, folder, alignment=0)  # one node writes each file
        loads = call("load", 2, str(root / "none" / CHECKPOINT), folder)
        received = in_namespaces(root, interface, save, loads)
        lines = [line for line in outputs(root).splitlines() if "network: " in line]
        assert len(lines) == 2, outputs(root)  # of rank 0
        for line in lines:
            assert f" between {subnet}.1, {subnet}.2; slowest {subnet}." in line, line
        match = re.search(r"slowest .* to .*: ([\d.]+) ([MG])iB/s", lines[1])
        assert match is not None, lines[1]
        rates[interface] = float(match[1]) * (1024 if match[2] == "G" else 1)
        assert (received["fast"] > 4 << 20) == (interface == "fast"), received
        assert (received["slow"] > 4 << 20) == (interface == "slow"), received
    assert rates["slow"] < 10 < rates["fast"], rates  # 40 Mbit/s are 4.8 MiB/s
