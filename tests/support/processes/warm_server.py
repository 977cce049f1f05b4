"""Forks a process for each script that a client requests, with modules already imported:
`warm_server.py SOCKET MODULES`, until its standard input ends.

Each process has a supervisor. It passes on the client's signals, reports the exit status, and kills
the process when the client is gone.
"""

import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def serve(listener: socket.socket) -> dict[str, Any]:
    """Return the request in each process that is to run one; otherwise never."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for a supervisor
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as stream:
            request: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "little")))
        worker = os.fork()
        if worker:
            supervise(worker, connection)
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return request


def supervise(worker: int, connection: socket.socket) -> None:
    ended = os.pidfd_open(worker)
    while True:
        ready, _, _ = select.select([ended, connection], [], [])
        if ended in ready:
            connection.sendall(os.waitpid(worker, 0)[1].to_bytes(4, "little"))
            os._exit(0)
        signals = connection.recv(64)
        for number in signals or [signal.SIGKILL]:
            os.kill(worker, number)
        if not signals:
            os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Set up the process as a new interpreter would, and run the script."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv = request["argv"]
    if sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    main = ModuleType("__main__")  # stays for functions that run at the interpreter's exit
    main.__dict__.update(__file__=sys.argv[0], __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with open(sys.argv[0], "rb") as script:
        exec(compile(script.read(), sys.argv[0], "exec"), main.__dict__)


def start() -> dict[str, Any]:
    path, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    threads = {
        Path(f"/proc/self/task/{thread}/comm").read_text().strip()
        for thread in os.listdir("/proc/self/task")[1:]
    }
    if threads - {"jemalloc_bg_thd"}:  # restarts in a forked process
        raise SystemExit(f"{modules}: left threads, which a fork does not take along: {threads}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path + "~")
    listener.listen(64)
    os.rename(path + "~", path)
    return serve(listener)


if __name__ == "__main__":
    become(start())
