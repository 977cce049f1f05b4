"""Stands in for a process of a warm server (see `warm.py`): `warm_client.py SOCKET SCRIPT
ARGUMENTS`, or `-m MODULE` or `-c PROGRAM` for a script.

It passes on its arguments and the signals it receives, and exits as that process does. It imports
next to nothing.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType

server, *argv = sys.argv[1:]
request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(server)


def pass_on(number: int, frame: FrameType | None) -> None:
    connection.sendall(bytes([number]))


for known in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(known, pass_on)
socket.send_fds(connection, [len(request).to_bytes(4, "little")], [0, 1, 2])
connection.sendall(request)
status = connection.recv(4)
if len(status) < 4:
    raise SystemExit(f"the warm server of {server} has ended")
code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
