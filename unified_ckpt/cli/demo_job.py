"""A training job that the demo starts, follows and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Job:
    """A training job in its own processes, and the log that it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    output: Path
    lines_read: int = 0
    killed: bool = False
    pids: list[int] = field(default_factory=list)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the log entries that are new since the last call."""
        lines = self.log.read_bytes().split(b"\n")[:-1] if self.log.exists() else []
        for line in lines[self.lines_read :]:
            self.lines_read += 1
            entry = json.loads(line)
            if entry["event"] == "started":
                self.pids.append(entry["pid"])
            yield entry

    def kill(self) -> int:
        """Send SIGKILL to torchrun and every rank. Return the number of ranks."""
        self.killed = True
        self.process.kill()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return len(self.pids)


def tail(output: Path) -> str:
    """Return the last part of a run's output, for errors."""
    return output.read_text(errors="replace")[-6000:]
