"""Forks a process for each script that a client requests, with modules already imported:
`warm_server.py SOCKET MODULES`, until its standard input ends.

Each process has a supervisor. It passes on the client's signals, reports the exit status, and kills
the process when the client is gone.
"""

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
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
    main = ModuleType("__main__")  # stays for functions that run at the interpreter's exit
    main.__dict__.update(__builtins__=__builtins__)
    sys.modules["__main__"] = main
    if sys.argv[0] == "-c":
        sys.path[0] = ""
        exec(sys.argv.pop(1), main.__dict__)
        return
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    main.__dict__.update(__file__=sys.argv[0])
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
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages of what is imported
    return serve(listener)


def run(request: dict[str, Any]) -> int:
    """Run the script. Return the exit code."""
    try:
        become(request)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    exit_code = run(start())
    # As an interpreter ends, without the release of all modules: that costs 0.7 s of a core, and a
    # thread of gloo's may still hold a tensor, whose release aborts the process ("terminate called
    # without an active exception", pytorch/pytorch#179291).
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
