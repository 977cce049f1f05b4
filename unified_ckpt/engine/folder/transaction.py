"""The only way to create a checkpoint folder: it is staged, then published, or removed.

`RenamePublisher` publishes by renames: on a file system, the commit is one of them.
`ObjectPublisher` publishes by a commit record: in a bucket, nothing can be renamed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, cast

from unified_ckpt.core.text import human_size
from unified_ckpt.engine.folder.if_exists import PublishTarget, check_target_name
from unified_ckpt.engine.folder.publish.commit import finish_pending
from unified_ckpt.engine.folder.publish.renames import RenamePublisher
from unified_ckpt.engine.folder.publish.uploads import ObjectPublisher
from unified_ckpt.engine.folder.stored_files import check_free_space
from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.error_spread import Spread, spread_of
from unified_ckpt.runtime.objects.staged import UploadedFile
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.storage import LocalStorage

_MANIFEST_NBYTES = 16 << 10  # an upper bound for most manifests


class Transaction(AbstractContextManager["Transaction"]):
    """One checkpoint from the creation of its staging folder until it has its name.

    Every rank of `collective` has one; the rank `leader` creates, renames and removes. Work in a
    `with` block: an error before the folder is published removes it, and whatever had the name
    keeps it.

    `folder` is the staging folder, beside the checkpoint, and `save_id` its id: both are known
    after `begin`. In a bucket it is only a name, below which files are written. Only the leader has
    a `publisher`, and only for a folder that it has begun.
    """

    def __init__(
        self,
        collective: Collective,
        storage: Storage,
        target: PublishTarget,
        *,
        leader: int = 0,
    ) -> None:
        self.collective, self.storage = collective, storage
        self.leader, self.is_leader = leader, collective.rank == leader
        self.folder = self.save_id = ""
        self._target = target
        self.publisher: RenamePublisher | ObjectPublisher | None = None
        if isinstance(storage, ObjectStorage):
            storage.on_request = collective.heartbeat

    @property
    def is_in_bucket(self) -> bool:
        """Whether files are uploads, of which each part comes from one rank."""
        return isinstance(self.storage, ObjectStorage)

    def begin(
        self,
        kept_manifest: Callable[[], Manifest | None],
        *,
        entries_before: frozenset[str] | None = None,
        save_id: str = "",
        copied_save_id: str = "",
    ) -> dict[str, Any] | None:
        """Collective. Create the staging folder, unless a checkpoint that has the name is kept.

        The leader decides by `kept_manifest()`; "id" and "step" of that checkpoint are returned.
        `entries_before`: the result of `check_target_name`, if it was called before the
        save. The id is new by default, as an interrupted attempt may have left a folder. In a
        bucket, that of a copy is `copied_save_id`: a commit compares it with the manifest's.
        """
        collective = self.collective
        if self.is_in_bucket:
            save_id = save_id or copied_save_id
        with collective.step("create-staging"):
            if self.is_leader:
                if isinstance(self.storage, ObjectStorage):
                    finish_pending(self.storage, self._target.name)
                if entries_before is None:
                    entries_before = check_target_name(self.storage, self._target)
                manifest = kept_manifest()
                if manifest is None:
                    self._create(save_id or secrets.token_hex(8), entries_before)
                    outcome: dict[str, Any] = {"id": self.save_id, "folder": self.folder}
                else:
                    outcome = {"id": manifest.save_id, "step": manifest.step}
                collective.put_json("staging-dir", outcome)
            received: dict[str, Any] = collective.get_json("staging-dir")
            self.save_id, self.folder = received["id"], received.get("folder", "")
            if isinstance(self.storage, ObjectStorage) and self.folder and not self.is_leader:
                self.storage.stage(self.folder, self._target.name, label=self.save_id)
        return None if self.folder else received

    def _create(self, save_id: str, entries_before: frozenset[str]) -> None:
        """Create the staging folder."""
        storage, target = self.storage, self._target
        folder = names.staging_name(target.name, save_id)
        if isinstance(storage, ObjectStorage):
            self.publisher = ObjectPublisher(
                storage, target, folder=folder, save_id=save_id, uploads_id=secrets.token_hex(8)
            )
        else:
            local = cast("LocalStorage", storage)
            self.publisher = RenamePublisher(
                local, target, folder=folder, save_id=save_id, entries_before=entries_before
            )
        self.publisher.stage()
        self.folder, self.save_id = folder, save_id

    def check_visible(self) -> None:
        """StorageError unless this rank sees the staging folder that the leader created.

        In a bucket, the first upload of a rank shows it.
        """
        if isinstance(self.storage, ObjectStorage):
            return
        try:
            save_id_bytes = self.storage.read(f"{self.folder}/{names.SAVE_ID_FILE}")
        except NotFoundError:
            save_id_bytes = b""
        if save_id_bytes != self.save_id.encode():
            raise StorageError(
                f"{self.storage.path(self.folder)}: this rank does not see this folder, "
                f"which rank {self.leader} created; use one folder that all ranks see"
            )

    def check_free_space(self, nbytes: int, *, index_nbytes: int = 0) -> None:
        """StorageError if the file system lacks space for what is to be written.

        `nbytes`: tensors and digests. `index_nbytes`: indexes and headers.
        """
        other_nbytes = index_nbytes + _MANIFEST_NBYTES
        content = (
            f"{human_size(nbytes)} of tensors and digests, "
            f"{human_size(other_nbytes)} of indexes and the manifest"
        )
        check_free_space(self.storage, self.folder, nbytes + other_nbytes, content)

    def expect_files(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """In a bucket: begin the uploads of files of these sizes, and return their ids."""
        if not isinstance(self.storage, ObjectStorage):
            return {}
        staged = self.storage.staged(self.folder)
        staged.expect(sizes)
        return staged.begin(*sizes)

    def join_files(self, upload_ids: Mapping[str, str], sizes: Mapping[str, int]) -> None:
        """In a bucket: write to uploads that the leader has begun."""
        if isinstance(self.storage, ObjectStorage) and not self.is_leader:
            staged = self.storage.staged(self.folder)
            staged.expect(sizes)
            staged.join(upload_ids)

    def collect_uploads(self) -> None:
        """Collective, inside a step. Wait for uploads; the leader learns of those of all ranks."""
        if not isinstance(self.storage, ObjectStorage):
            return
        staged = self.storage.staged(self.folder)
        uploads = {
            file: [upload.upload_id, upload.nbytes, list(upload.etags.items())]
            for file, upload in staged.finish().items()
            if upload.etags
        }
        others = [rank for rank in range(self.collective.world) if rank != self.leader]
        collected = self.collective.collect_json("uploads", uploads, dst=self.leader, ranks=others)
        for other in collected:
            staged.merge(
                {
                    file: UploadedFile(upload_id, nbytes, dict(etags))
                    for file, (upload_id, nbytes, etags) in other.items()
                }
            )
        if not self.is_leader:
            staged.release()

    def publish_and_clean_up(self) -> None:
        """Collective. Publish the finished folder, then delete what it replaced.

        A rank that dies in this step makes all ranks raise. If the leader dies, the path has one of
        the two checkpoints, whole, and hidden folders may remain. Otherwise it has the new one.
        """
        with self.collective.step("publish"):
            if self.publisher is not None:
                self.publisher.publish()
                self.publisher.clean_up()

    def publish_with_others(self, wait_for_others: Callable[[], None]) -> None:
        """Collective. Publish the finished folder, or withdraw it if `wait_for_others` raises."""
        assert not isinstance(self.publisher, ObjectPublisher)  # all ranks share a bucket
        try:
            # A step of its own: a rank that waits for others does not see its leader fail.
            with self.collective.step("publish"):
                if self.publisher is not None:
                    self.publisher.publish()
            wait_for_others()
        except Exception:
            if self.publisher is not None:
                self.publisher.withdraw()
            raise

    def clean_up(self) -> None:
        """On the leader: delete what the published folder replaced."""
        if self.publisher is not None:
            self.publisher.clean_up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error: share it, and remove the folder once no rank writes to it."""
        if error is None:
            return
        if self.collective.world > 1 and spread_of(error) is not Spread.SHARED:
            self.collective.share_error(error)
        if self.publisher is None and isinstance(self.storage, ObjectStorage):
            with suppress(CheckpointError, OSError):
                self.storage.unstage(self.folder)
        self.collective.mark_stopped()
        if self.publisher is None or self.publisher.is_published:
            return
        self.collective.wait_stopped()
        with suppress(CheckpointError, OSError):  # raise the error that ended the save
            self.publisher.discard()
