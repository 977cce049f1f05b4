"""One session for each process group: plans and buffers stay between the calls of a program.

A session whose group was destroyed is closed by the next call. At exit, the interpreter waits for
unfinished saves.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from unified_ckpt.runtime.comm.comm import is_destroyed
from unified_ckpt.session import Session

if TYPE_CHECKING:
    import torch.distributed as dist

_ALONE = 0  # the key of the session of this process by itself
_SESSIONS: dict[int, Session] = {}  # by id of the group, which the session keeps


def session_of(group: dist.ProcessGroup | None, *, no_dist: bool) -> Session:
    """Return the session of a group's calls, without a save in flight.

    `no_dist`: this process saves and loads by itself, and sends nothing to others.
    """
    for key, session in list(_SESSIONS.items()):
        if not session.is_group_current() or is_destroyed(session.group):
            del _SESSIONS[key]
            with suppress(Exception):  # that of the save in flight, which its Future has
                session.close()
    key = _ALONE if no_dist else id(group)
    if key not in _SESSIONS:
        _SESSIONS[key] = Session(group=None if no_dist else group, alone=no_dist)
    with suppress(Exception):  # as in DCP, the Future of that save has its error
        _SESSIONS[key].wait()
    return _SESSIONS[key]
