"""Real S3 servers on 127.0.0.1: moto in this process, and OpenStack Swift with its S3 API."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from unified_ckpt.storage_options import StorageOptions

BIN = Path(sys.executable).parent
START_SECONDS = 60.0

RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, port in zip(("account", "container", "object"), sys.argv[2:]):
    builder = RingBuilder(4, 1, 1)
    builder.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d1",
                     "weight": 1.0, "replication_ip": "127.0.0.1", "replication_port": int(port)})
    builder.rebalance()
    builder.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz")
"""
SERVER = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
disable_fallocate = true
log_level = WARNING
log_address = {folder}/no-socket
"""
STORAGE = """
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
PROXY = """
[pipeline:main]
pipeline = catch_errors listing_formats s3api tempauth slo versioned_writes symlink proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
max_upload_part_num = 10000
min_segment_size = {min_part_nbytes}
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:slo]
use = egg:swift#slo
max_manifest_segments = 10000
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
[filter:symlink]
use = egg:swift#symlink
"""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Swift:
    """OpenStack Swift with one replica, in four processes. `kill` and `start` may be repeated."""

    def __init__(self, folder: Path, *, min_part_nbytes: int = 1) -> None:
        assert find_spec("swift"), "the tests need Swift; run: pip install -e '.[test]'"
        self.folder = folder
        self.ports = free_ports(4)
        self.endpoint = f"http://127.0.0.1:{self.ports[0]}"
        self.options = StorageOptions(
            endpoint=self.endpoint,
            region="us-east-1",
            access_key="test:tester",
            secret_key="testing",
        )
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "devices/d1").mkdir(parents=True)
        (folder / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n"
            "[storage-policy:0]\nname = one\ndefault = yes\n"
        )
        storage_ports = list(map(str, self.ports[1:]))
        subprocess.run([sys.executable, "-c", RINGS, folder, *storage_ports], check=True)
        values = {"folder": folder, "user": os.environ.get("USER", "root")}
        for name, port in zip(("account", "container", "object"), storage_ports, strict=True):
            text = SERVER.format(port=port, **values) + STORAGE.format(name=name)
            (folder / f"{name}.conf").write_text(text)
        proxy = PROXY.format(min_part_nbytes=min_part_nbytes)
        (folder / "proxy.conf").write_text(SERVER.format(port=self.ports[0], **values) + proxy)

    def start(self) -> None:
        """Start the processes that do not run, and wait until they answer."""
        for name in ("account", "container", "object", "proxy"):
            if name not in self.processes:
                with (self.folder / f"{name}.log").open("ab") as log:
                    self.processes[name] = subprocess.Popen(
                        [BIN / f"swift-{name}-server", self.folder / f"{name}.conf", "-v"],
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
        end = time.monotonic() + START_SECONDS
        while not all(map(accepts, self.ports)):
            logs = [(self.folder / f"{name}.log").read_text() for name in self.processes]
            assert time.monotonic() < end, "\n".join(logs)
            time.sleep(0.05)
        with urllib.request.urlopen(f"{self.endpoint}/info", timeout=START_SECONDS):
            pass

    def kill(self, *names: str) -> None:
        """Kill the processes of these names, or all, with those that they have started."""
        for name in names or tuple(self.processes):
            process = self.processes.pop(name)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def accepts(port: int) -> bool:
    """Whether a server accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def swift_server(folder: Path, *, min_part_nbytes: int = 1) -> Iterator[Swift]:
    """A running Swift, whose files are below a folder; ended with the context."""
    swift = Swift(folder, min_part_nbytes=min_part_nbytes)
    try:
        swift.start()
        yield swift
    finally:
        swift.kill()


class MotoUploads(dict[str, Any]):
    """A bucket's uploads in moto, which answers HTTP 500 for one that has ended."""

    def __missing__(self, upload_id: str) -> Any:
        from moto.s3.exceptions import NoSuchUpload

        raise NoSuchUpload(upload_id=upload_id)


@contextmanager
def moto_server() -> Iterator[StorageOptions]:
    """A running moto, which takes parts of any size; ended with the context.

    It gives all uploads the same date.
    """
    import moto.s3.models
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    bucket = moto.s3.models.FakeBucket

    def initialize(self: Any, *arguments: Any, **keywords: Any) -> None:
        initialize_bucket(self, *arguments, **keywords)
        self.multiparts = MotoUploads()

    initialize_bucket = bucket.__init__
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with (
        patch.object(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1),
        patch.object(bucket, "__init__", initialize),
    ):
        server.start()
        try:
            host, port = server.get_host_and_port()
            yield StorageOptions(
                endpoint=f"http://{host}:{port}",
                region="us-east-1",
                access_key="test",
                secret_key="test",
            )
        finally:
            server.stop()


def make_bucket(options: StorageOptions, name: str) -> None:
    """Create a bucket by the SDK: the library never does."""
    import boto3

    assert options.access_key is not None
    assert options.secret_key is not None
    client = boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region,
        aws_access_key_id=options.access_key.get_secret_value(),
        aws_secret_access_key=options.secret_key.get_secret_value(),
    )
    client.create_bucket(Bucket=name)
    client.close()
