"""Says what a save will write before it runs: the planner's files, and the measured disk, or the
requests to a bucket.

Plans as a save does, from names, shapes and dtypes. Reads no value of a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.engine.encode.agree import agree_on_encodings, with_encodings
from unified_ckpt.engine.plan.save_plan import GlobalPlan, make_plan
from unified_ckpt.engine.save.layout.resumable_parts import agree_on_parts
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.errors import OptionError
from unified_ckpt.estimates.requests import Requests, save_requests
from unified_ckpt.format import index, names
from unified_ckpt.format.encoded_tensors import Compression
from unified_ckpt.options import ManagerOptions
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.staged import DEFAULT_PART_NBYTES
from unified_ckpt.runtime.storage.write_speed import DiskSample, measure_disk
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

COMPRESSIONS: tuple[Compression, ...] = ("none", "lossless", "O1", "O2")
_SAMPLE_NBYTES, _MAX_WRITERS = 128 << 20, 32  # of all ranks together
_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted size and time of a save.

    `compression`: that of the options. `files`: bytes of each tensor, index and digest file. The
    manifest, `extra` and outliers are not included.
    `parts_by_compression`: tensor bytes by part for each compression, except outliers.
    `kept`: the number of checkpoints on disk; None if the rules keep ever more. `steps`,
    `checkpoints`: of the rest of the run, if its end is known; else None.
    `interval_seconds`: from one save to the next, or None.
    `free_nbytes`, `bytes_per_second`: free space, and the measured speed of up to 32 ranks that
    write and sync; None without a folder, and for a bucket. `requests`: of a save to a bucket.
    """

    compression: Compression
    files: Mapping[str, int]
    parts_by_compression: Mapping[Compression, Mapping[str, int]]
    kept: int | None
    interval_seconds: float | None = None
    free_nbytes: int | None = None
    bytes_per_second: float | None = None
    steps: int | None = None
    checkpoints: int | None = None
    requests: Requests | None = None

    @property
    def parts(self) -> Mapping[str, int]:
        """Tensor bytes by part."""
        return self.parts_by_compression[self.compression]

    @property
    def nbytes(self) -> int:
        """Bytes of a save."""
        return sum(self.files.values())

    @property
    def room_nbytes(self) -> int | None:
        """Bytes of the kept checkpoints and of the one that is being written; None if unlimited."""
        if self.kept is None:
            return None
        return min(self.kept + 1, self.checkpoints or self.kept + 1) * self.nbytes

    @property
    def run_nbytes(self) -> int | None:
        """Bytes that the rest of the run writes, including checkpoints that are later removed."""
        return None if self.checkpoints is None else self.checkpoints * self.nbytes

    @property
    def run_seconds(self) -> float | None:
        """Seconds that the remaining saves of the run take, at the measured speed."""
        if self.seconds is None or self.checkpoints is None:
            return None
        return self.checkpoints * self.seconds

    @property
    def seconds(self) -> float | None:
        """Seconds of a save at the measured speed."""
        return self.nbytes / self.bytes_per_second if self.bytes_per_second else None

    @property
    def bytes_per_day(self) -> float | None:
        """Bytes written per day, including those of checkpoints that are later removed."""
        return self.nbytes * _DAY / self.interval_seconds if self.interval_seconds else None

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {human_size(nbytes)}" for part, nbytes in self.parts.items())
        others = ", ".join(
            f"{form} {human_size(sum(nbytes.values()))}"
            for form, nbytes in self.parts_by_compression.items()
            if form != self.compression
        )
        first = f"{human_size(self.nbytes)} per save in {count_text(len(self.files), 'file')}"
        form = "" if self.compression == "none" else f" with compression {self.compression}"
        lines = [f"{first}{form}: {parts}", f"other compressions: {others}", self._needs()]
        if self.run_nbytes is not None:
            lines.append(self._run())
        return "\n  ".join(lines)

    def _run(self) -> str:
        text = (
            f"{count_text(self.steps or 0, 'step')} remaining: "
            f"{count_text(self.checkpoints or 0, 'checkpoint')}, "
            f"{human_size(self.run_nbytes or 0)} written"
        )
        if self.requests is not None:
            dollars = (self.checkpoints or 0) * self.requests.dollars
            return f"{text}, ${dollars:.2f} for requests"
        return text if self.run_seconds is None else f"{text} in {self.run_seconds:.2f} s"

    def _needs(self) -> str:
        writing = "" if self.kept == self.checkpoints else " and one being written"
        room = (
            "room grows with every save: no limit of what to keep"
            if self.room_nbytes is None
            else f"{human_size(self.room_nbytes)} of room for {self.kept} kept{writing}"
        )
        free = "" if self.free_nbytes is None else f", {human_size(self.free_nbytes)} free"
        texts = [room + free]
        if self.requests is not None:
            dollars = f"${self.requests.dollars:.4f}"
            texts.append(f"{self.requests.total:,} requests for {dollars} per save")
        if self.seconds is not None and self.bytes_per_second is not None:
            speed = human_size(int(self.bytes_per_second))
            texts.append(f"{self.seconds:.2f} s at {speed}/s as measured")
        if self.bytes_per_day is not None:
            texts.append(f"{human_size(int(self.bytes_per_day))} per day")
        return "; ".join(texts)


@dataclass(frozen=True, slots=True)
class EstimateCall:
    """One call of an estimate on this rank.

    `request`: the save to plan, or the error that this rank met while it built one. `folder`:
    absolute path of the folder to measure, None to measure nothing; or the URL of a bucket.
    `steps`: those of the run that are left.
    """

    request: SaveRequest | Exception
    folder: str | None
    manager_options: ManagerOptions | None
    interval_seconds: float | None
    timeout_seconds: float
    steps: range | None = None


def estimate_save(comm: Comm, call: EstimateCall) -> Estimate:
    """Collective. Plan the save in every compression and measure the disk; equal on all ranks."""
    request = call.request
    arguments = None
    if isinstance(request, SaveRequest):
        steps = None if call.steps is None else [call.steps.start, call.steps.stop]
        arguments = {
            "folder": call.folder,
            "steps": steps,
            **request.options.model_dump(mode="json"),
        }
    collective = comm.begin_collective(
        Call("estimate of a save", arguments), timeout_seconds=call.timeout_seconds
    )
    in_bucket = call.folder is not None and is_bucket_url(call.folder)
    with collective.propagating_errors():
        with collective.step("check-state"):
            if isinstance(request, Exception):
                raise request
            request = request.with_omitted_parts(agree_on_parts(collective, request))
        with collective.step("measure"):
            disk = None if in_bucket else _measure(collective, call.folder)
    tensors = request.stored_tensors()
    plans = {form: _plan(comm, call, request, tensors, form) for form in COMPRESSIONS}
    chosen = request.options.compression
    options = call.manager_options
    saved = saved_steps(options, call.steps) if options and call.steps else None
    files: Mapping[str, int] = plans[chosen]["files"]
    return Estimate(
        compression=chosen,
        files=files,
        parts_by_compression={form: plan["parts"] for form, plan in plans.items()},
        kept=1 if options is None else kept_checkpoints(options, saved),
        interval_seconds=call.interval_seconds or (options.interval_seconds if options else None),
        free_nbytes=disk.free_nbytes if disk else None,
        bytes_per_second=disk.nbytes / max(disk.seconds, 1e-9) if disk else None,
        steps=None if call.steps is None else len(call.steps),
        checkpoints=None if saved is None else len(saved),
        requests=save_requests(files, smallest_part_nbytes=DEFAULT_PART_NBYTES)
        if in_bucket
        else None,
    )


def _measure(collective: Collective, folder: str | None) -> DiskSample | None:
    """Collective. Return the sum of what some ranks wrote at once, and the longest time."""
    if folder is None:
        return None
    writers, share = sample_shares(collective.world)
    fields = None
    if collective.rank in writers:
        sample = measure_disk(folder, share)
        fields = [sample.nbytes, sample.seconds, sample.free_nbytes]
    samples = collective.collect_json("disk", fields, dst=0, ranks=writers)
    total = None
    if samples:
        nbytes, seconds, free_nbytes = zip(*samples, strict=True)
        total = [sum(nbytes), max(seconds), min(free_nbytes)]
    return DiskSample(*collective.broadcast_json("disk-total", total))


def sample_shares(world: int) -> tuple[range, int]:
    """Return the ranks that write to measure a disk, and how many bytes each of them writes."""
    writers = range(0, world, -(-world // _MAX_WRITERS))
    return writers, _SAMPLE_NBYTES // len(writers)


def check_steps(steps: object, first_step: int, options: ManagerOptions | None) -> range:
    """Return the steps of a run that ends at `steps`.

    OptionError if there are none, or if the options save by the clock only.
    """
    if options is None or (options.interval_steps is None and not options.steps):
        raise OptionError(
            "steps: got no interval in steps, and saves by the clock cannot be counted; "
            "set ManagerOptions(interval_steps=…), or --every-steps on the command line"
        )
    rest = range(first_step, steps) if type(steps) is int else steps
    if not isinstance(rest, range) or rest.step != 1 or not 0 <= rest.start < rest.stop:
        raise OptionError(
            f"steps: got {steps!r}, expected the step at which the run ends, after step "
            f"{first_step}, or a range of steps"
        )
    return rest


def saved_steps(options: ManagerOptions, steps: range) -> set[int]:
    """Return the steps in (start, stop] of `steps` that a manager saves to the root.

    Saves by the clock are not included. With `on_start`, neither is the start of a run.
    """
    start, stop = steps.start, steps.stop
    saved = {step for step in options.steps if start < step <= stop}
    if options.interval_steps is not None:
        first = start - start % options.interval_steps + options.interval_steps
        saved |= set(range(first, stop + 1, options.interval_steps))
    return saved | ({stop} if options.on_completion else set())


def kept_checkpoints(options: ManagerOptions, saved: Collection[int] | None = None) -> int | None:
    """Return how many full checkpoints the rules keep at most; None if there is no limit.

    `saved`: all steps that the run saves, if they are known.
    """
    best = options.keep_best or int(options.best_metric is not None)
    limit = (options.keep_latest or 1) + best
    has_rule = options.keep_latest is not None or options.keep_best is not None
    if options.keep_every_seconds or options.trash_directory:
        has_rule = False
    elif options.keep_every_steps:
        if saved is None:
            return None
        has_rule = True
        limit += sum(step % options.keep_every_steps == 0 for step in saved)
    if saved is None:
        return limit if has_rule else None
    return min(limit, len(saved)) if has_rule else len(saved)


def _plan(
    comm: Comm,
    call: EstimateCall,
    request: SaveRequest,
    tensors: Sequence[LocalTensor],
    form: Compression,
) -> dict[str, Any]:
    """Collective. Return the bytes by file and by part, as one save in this form has them."""
    collective = comm.begin_collective(
        f"estimate with compression {form}", timeout_seconds=call.timeout_seconds
    )
    with collective.propagating_errors(), collective.step("plan"):
        agreement = agree_on_encodings(collective, tensors, form, reads_values=False)
        plan = make_plan(
            collective,
            with_encodings(tensors, agreement.encodings),
            layout=request.layout,
            matched_rules=request.matched_rules,
            max_file_bytes=request.options.max_file_bytes,
        )
        sizes = None
        if plan.global_plan is not None:
            parts = dict.fromkeys(request.stored_part_names(), 0)
            parts |= plan.global_plan.tensors.nbytes
            sizes = {"files": _file_sizes(plan.global_plan), "parts": parts}
        planned: dict[str, Any] = collective.broadcast_json("sizes", sizes)
        return planned


def _file_sizes(plan: GlobalPlan) -> dict[str, int]:
    """Return the bytes of all files whose content follows from the plan, by name."""
    tensors = plan.tensors
    sizes = {
        file: record.nbytes
        for records in tensors.records.values()
        for file, record in records.items()
    }
    for part, weight_map in tensors.weight_maps.items():
        body = index.encode_index(total_size=tensors.nbytes[part], weight_map=weight_map)
        sizes[names.index_name(part)] = len(body)
    return {**sizes, names.DIGESTS: plan.digest_file_nbytes}
