"""Opens a checkpoint in a bucket on all ranks, of which few ask for its metadata.

Every rank needs the manifest, the indexes and the headers; thousands of ranks would send millions
of requests for them. Rank 0 reads them once and sends them to one rank of each node, which adds the
digests and shares all of it in memory. A rank asks for itself only about what is missing or
damaged, so that its error names it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress

from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.source.protocol import ReadPolicy
from unified_ckpt.errors import FormatError, IncompleteError, IntegrityError, NotFoundError
from unified_ckpt.format import header
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.exchange.shared_memory import open_shared_bytes, share_bytes
from unified_ckpt.runtime.objects.known import KnownObjects, decode_known
from unified_ckpt.runtime.objects.reader import ObjectReader

_DAMAGE = (FormatError, IncompleteError, IntegrityError, NotFoundError)


def open_bucket(
    collective: Collective, path: str, topology: Topology, policy: ReadPolicy, resources: ExitStack
) -> Folder:
    """Return the folder at a URL of a bucket. Collective.

    `resources`: closed after all ranks have read. Raises the error of rank 0 on every rank.
    """
    rank, node = collective.rank, topology.node
    folder: Folder | None = None
    with collective.step("read-metadata"):
        if rank == 0:
            folder = open_path(path, lock=False, policy=policy)
            resources.callback(folder.close)
            known = _read_metadata(folder, collective.heartbeat)
            if topology.spans_nodes:
                collective.put("metadata", zlib.compress(known.encode(), 1))
    with ExitStack() as shared, collective.step("share-metadata"):
        if topology.is_node_leader:
            if folder is None:
                known = decode_known(memoryview(zlib.decompress(collective.get("metadata"))))
                folder = open_path(path, lock=False, policy=policy, known=known)
                resources.callback(folder.close)
            known = _read_digests(folder, policy)
            if topology.local_world > 1:
                body = known.encode()
                handle, fd = share_bytes(body)
                shared.callback(os.close, fd)
                collective.put_json(f"metadata/{node}", [handle, len(body)])
        else:
            memory = open_shared_bytes(*collective.get_json(f"metadata/{node}"))
            folder = open_path(path, lock=False, policy=policy, known=decode_known(memory))
            resources.callback(folder.close)
    assert folder is not None
    return folder


def _read_metadata(folder: Folder, heartbeat: Callable[[], None]) -> KnownObjects:
    """Return what every rank needs of a folder: manifest, indexes, headers and small state."""
    reader = _reader(folder)
    files = [file for part in folder.parts for file in folder.tensors_by_file(part)]
    folder.expect_headers(files)
    for file in files:
        with suppress(*_DAMAGE):
            _keep_header(reader, file)
        heartbeat()
    manifest = folder.manifest
    if manifest is not None:
        if manifest.extra_file is not None:
            with suppress(*_DAMAGE):
                reader.read(manifest.extra_file.file)
        for record in (manifest.rank_extra, manifest.rank_values):
            if record is not None:
                with suppress(*_DAMAGE):
                    reader.trim(record.file, folder.entries(record)["blobs"].start)
    return reader.known


def _keep_header(reader: ObjectReader, file: str) -> None:
    nbytes = reader.size(file)
    if nbytes is not None:
        prefix = reader.keep(file, min(header.PREFIX_NBYTES, nbytes))
        reader.trim(file, header.header_nbytes(prefix, file_size=nbytes, file=file))


def _read_digests(folder: Folder, policy: ReadPolicy) -> KnownObjects:
    """Return what is known of a folder, with digests and outliers: too much for the store."""
    reader, manifest = _reader(folder), folder.manifest
    if manifest is not None:
        records = [
            each for part, each in manifest.outlier_records().items() if part in folder.parts
        ]
        files = [record.file for record in records]
        if manifest.digests is not None and policy.verify != "off":
            files.append(manifest.digests.file)
        for file in files:
            with suppress(*_DAMAGE):
                reader.read(file)
    return reader.known


def _reader(folder: Folder) -> ObjectReader:
    assert isinstance(folder.storage, ObjectReader)
    return folder.storage
