"""Measure the cost for a rank when many ranks of other nodes send to it at once.

In a save to a shared folder by 16,384 ranks, 511 do.

Run: python benchmarks/bench_peer_writes.py [--connections N]. One JSON line: threads and resident
bytes per connection, seconds until all ranks are connected that arrive at the same moment, and
seconds until each has had 64 KiB written and acknowledged.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable

from unified_ckpt.core.nodes.write_alignment import WriteAlignment
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.tcp import Address, connect, receive_header, send_header
from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.storage.storage import LocalStorage

BODY = bytes(64 << 10)


def resident_nbytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return round(time.perf_counter() - began, 3)


def no_address(rank: int) -> Address:
    raise AssertionError(f"rank {rank} sends nothing to this rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=511)
    count = parser.parse_args().connections
    lines: dict[int, socket.socket] = {}
    with tempfile.TemporaryDirectory() as root:
        transport = PeerTransport(
            WriteAlignment((0, 1), 1 << 20), no_address, rank=0, ranks=(0, 1), timeout_seconds=60
        )
        storage = LocalStorage(root)
        storage.make_folder("folder")
        barrier, before, threads = (
            threading.Barrier(count),
            resident_nbytes(),
            threading.active_count(),
        )

        def arrive(number: int) -> None:
            barrier.wait(60)
            lines[number] = connect(transport.address, timeout_seconds=60)

        def arrive_all() -> None:
            callers = [threading.Thread(target=arrive, args=(number,)) for number in range(count)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()

        def write_all() -> None:
            frame = {"type": "write", "save": "save", "file": "x", "crc": digests.crc(BODY)}
            for number, line in lines.items():
                start = number * len(BODY)
                send_header(line, {**frame, "start": start}, nbytes=len(BODY))
                line.sendall(BODY)
                send_header(line, {"type": "flush"})
            for line in lines.values():
                assert receive_header(line)[0] == {"error": ""}

        row: dict[str, object] = {
            "bench": "peer_writes",
            "connections": count,
            "connect_seconds": timed(arrive_all),
        }
        with transport.receiving("save", storage, "folder", Traffic()):
            row["write_seconds"] = timed(write_all)
        growth = resident_nbytes() - before
        print(
            json.dumps(
                {
                    **row,
                    "threads": threading.active_count() - threads,
                    "resident_bytes_each": growth // count,
                }
            )
        )
        for line in lines.values():
            line.close()
        transport.close()
        storage.close()


if __name__ == "__main__":
    main()
