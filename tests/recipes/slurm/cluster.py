"""A Slurm cluster of this machine alone: its daemons, and two nodes of two GPUs that are empty
files. Each node's processes see a disk, a shared memory and a kernel of their own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

NODES = ("node0", "node1")
PROGRAMS = ("munged", "slurmctld", "slurmd", "setpriv", "unshare")
CONFIGURATION = """\
ClusterName=recipe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=5
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = """\
mount --bind {folder}/disk-{node} {folder}/disk && mount --bind {folder}/boot-{node} {boot} &&
mount -t tmpfs shm /dev/shm && exec slurmd -D -N {node}
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """Run the daemons in a folder. Yields the path that is a disk of each node's own."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]:
        raise SystemExit(f"slurm: {missing} not found; install Debian's slurm-wlm and munge")
    if os.geteuid() != 0:
        raise SystemExit("slurm: expected root, which may give each node a disk; run as root")
    for name in ("state", "gpu", "disk", *(f"disk-{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    for number in range(2):
        (folder / "gpu" / str(number)).touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu/[0-1]\n")
    text = CONFIGURATION.format(
        folder=folder, host=socket.gethostname().split(".")[0], ports=_ports()
    )
    (folder / "slurm.conf").write_text(text)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    munge += [f"--socket={folder}/munge.socket", "--foreground", "--force"]
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_daemon(folder, "munged", *munge))
        _wait((folder / "munge.socket").exists, "munged")
        daemons.enter_context(_daemon(folder, "slurmctld", "-D"))
        for node in NODES:
            (folder / f"boot-{node}").write_text(str(uuid.uuid4()))
            command = NODE.format(folder=folder, node=node, boot="/proc/sys/kernel/random/boot_id")
            daemons.enter_context(_daemon(folder, "unshare", "--mount", "sh", "-c", command))
        _wait(lambda: output("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "sinfo")
        try:
            yield folder / "disk"
        finally:  # jobs survive their daemons
            subprocess.run(["scancel", "--me"], check=False)
            _wait(lambda: not output("squeue", "-h", "-t", "RUNNING,COMPLETING"), "squeue")


def output(*command: str) -> str:
    """The output of a command; empty if it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@contextlib.contextmanager
def _daemon(folder: Path, *command: str) -> Iterator[None]:
    environment = os.environ | {"PATH": _path()}
    with (folder / "daemons.log").open("a") as log:
        ends_with_this = "setpriv", "--pdeathsig", "TERM"
        process = subprocess.Popen(
            [*ends_with_this, *command], stdout=log, stderr=log, env=environment
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _wait(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"slurm: {what} is not ready after 60 seconds; see daemons.log")
        time.sleep(0.2)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _ports() -> list[int]:
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(3)]
        for bound in opened:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in opened]
