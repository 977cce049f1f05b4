"""Compressed checkpoints are decoded as the format says, and whatever does not fit is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

import unified_ckpt as uc
from tests.support.engine.compressed import QUICK, save_compressed, stored_files, trained_state
from tests.support.equality import same
from tests.support.format.decoders import decode_folder
from tests.support.format.manifests import edit_manifest
from tests.support.harness import make_checkpointer, try_ranks
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.decoded import DecodedSource, decode_source
from unified_ckpt.engine.source.whole_blocks import WholeBlocks
from unified_ckpt.foreign.open import open_source
from unified_ckpt.format.digests import BLOCK_NBYTES
from unified_ckpt.format.outliers import outliers_record
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.objects.read_ahead import REQUEST_NBYTES
from unified_ckpt.runtime.storage.protocol import ReadRange

State = dict[str, dict[str, Any]]
FORMS = ("lossless", "O1", "O2")


def targets_like(state: Mapping[str, Mapping[str, torch.Tensor]]) -> State:
    return {
        part: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        for part, tensors in state.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_load_decodes(form: str, tmp_path: Path) -> None:
    save_compressed(tmp_path / "c", form)
    expected, targets = decode_folder(tmp_path / "c"), targets_like(trained_state())
    report = uc.load(tmp_path / "c", **targets)
    for (part, name), tensor in expected.items():
        assert same(targets[part][name], tensor), (part, name)
    assert report.verified_bytes > 0.9 * sum(map(len, stored_files(tmp_path / "c").values()))


def test_lossless_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state, targets = trained_state(), targets_like(trained_state())
    save_compressed(tmp_path / "c", "lossless")
    assert "master_weights.exceptions.safetensors" in stored_files(tmp_path / "c")
    uc.load(tmp_path / "c", **targets)
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            assert same(targets[part][name], tensor), (part, name)


def test_masters_load_without_the_model(tmp_path: Path) -> None:
    """An fp32 trainer has no model beside its weights."""
    save_compressed(tmp_path / "c", "lossless")
    state = trained_state()["master_weights"]
    masters = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    options = uc.LoadOptions(parts=("master_weights",))
    uc.load(tmp_path / "c", master_weights=masters, options=options)
    for name, tensor in state.items():
        assert same(masters[name], tensor), name


def test_two_ranks_load_columns(tmp_path: Path) -> None:
    """Cuts inside blocks and rows of several digest blocks."""
    state = trained_state({"w": (500, 3001)})
    save_compressed(tmp_path / "c", "O2", state)
    expected = decode_folder(tmp_path / "c")
    layout = uc.Layout(mesh={"tp": 2}, rules={"w": {"tp": 1}}, shapes={"w": (500, 3001)})

    def act(comm: Comm) -> None:
        targets = {
            part: {
                name: torch.zeros_like(tensor.chunk(2, 1)[comm.rank] if tensor.dim() else tensor)
                for name, tensor in tensors.items()
            }
            for part, tensors in state.items()
        }
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(tmp_path / "c", **targets, layout=layout)
        for (part, name), tensor in expected.items():
            local = tensor.chunk(2, 1)[comm.rank] if tensor.dim() else tensor
            assert same(targets[part][name], local.contiguous()), (part, name)

    for result in try_ranks(2, act):
        assert result is None, result


def test_every_stored_block_is_verified(tmp_path: Path) -> None:
    """A load divides decoded bytes into chunks, which do not end where stored blocks end."""
    state = {"optimizer": trained_state({"w": (1100, 3001)})["optimizer"]}
    save_compressed(tmp_path / "c", "O1", state)
    path = tmp_path / "c" / "optimizer.safetensors"
    body = bytearray(path.read_bytes())
    for position in range(5000, len(body), 1 << 19):
        body[position] ^= 1
        path.write_bytes(body)
        with pytest.raises(uc.IntegrityError, match="w/exp_avg"):
            uc.load(tmp_path / "c", **targets_like(state))
        body[position] ^= 1


def test_ranges_are_read_as_whole_blocks(tmp_path: Path) -> None:
    tensor = torch.randint(0, 256, (5 << 19,), dtype=torch.uint8)
    uc.save(tmp_path / "c", model={"w": tensor}, options=QUICK)
    source, ranges = open_source(str(tmp_path / "c")), list[tuple[int, int]]()
    read_into = source.read_into

    def recorded(key: tuple[str, str], start: int, buffer: Any) -> None:
        ranges.append((start, start + len(buffer)))
        read_into(key, start, buffer)

    source.read_into = recorded  # type: ignore[method-assign]
    blocks, nbytes = WholeBlocks(source), tensor.numel()
    for low, high in [(5, 6), (7, 900), (900, 3 << 19), (2 << 20, nbytes), (nbytes - 1, nbytes)]:
        assert np.array_equal(blocks.read(("model", "w"), low, high), tensor.numpy()[low:high])
    assert ranges == [(0, 1 << 20), (1 << 20, 2 << 20), (2 << 20, nbytes)]
    source.close()


def test_what_is_announced_is_what_is_read(tmp_path: Path) -> None:
    """Each stored block once, while its reader goes on there, and in ranges of one request."""
    small = {f"s{number}": (9, 64) for number in range(17)}  # more than blocks are kept
    state = trained_state({"w": (1600, 3001)} | small)
    save_compressed(tmp_path / "c", "O1", state)
    source, blocks = open_source(str(tmp_path / "c")), Counter[ReadRange]()
    assert isinstance(source, DecodedSource)
    stored, nbytes = source.stored, 1600 * 3001 * 4
    read_into = stored.read_into

    def recorded(key: Key, start: int, buffer: Any) -> None:
        blocks.update(blocks_of(stored.file_ranges([(key, start, start + len(buffer))])))
        read_into(key, start, buffer)

    stored.read_into = recorded  # type: ignore[method-assign]
    reads = [
        (("master_weights", "w"), 0, 1_900_004),
        (("master_weights", "w"), 1_900_004, nbytes),  # goes on within a block
        *((("optimizer", "w/exp_avg"), row * 12_004, row * 12_004 + 400) for row in range(99)),
        (("optimizer", "w/exp_avg"), 4_000_000, nbytes),
        *((("master_weights", name), 0, 9 * 64 * 4) for name in small),
        (("master_weights", "w"), nbytes - 4, nbytes),  # is not kept any more
        (("model", "w"), 4, 90_000),  # is stored plain
        (("master_weights", "w"), 1_900_004, nbytes),  # begins within a block
    ]
    announced = list(source.file_ranges(reads))
    for key, start, stop in reads:
        source.read_into(key, start, memoryview(bytearray(stop - start)))
    assert Counter(blocks_of(announced)) == blocks
    assert max(item.stop - item.start for item in announced) <= REQUEST_NBYTES // 2
    source.close()


def blocks_of(ranges: Iterable[ReadRange]) -> Iterator[ReadRange]:
    """Yield the blocks of ranges, of which each begins with one."""
    for file, start, stop, _ in ranges:
        for low in range(start, stop, BLOCK_NBYTES):
            yield ReadRange(file, low, min(low + BLOCK_NBYTES, stop))


# hostile content


MOMENTS = {
    "w/exp_avg": torch.zeros(4, 64, dtype=torch.uint8),
    "w/exp_avg.scale": torch.ones(4, 1, dtype=torch.bfloat16),
    "w/exp_avg_sq": torch.zeros(4, 64, dtype=torch.uint8),
    "w/exp_avg_sq.scale": torch.ones(4, 2, dtype=torch.bfloat16),
}
O1 = {"exp_avg": {"name": "signed-sqrt-8"}, "exp_avg_sq": {"name": "log-8"}}
REF16 = {"": {"name": "masters-16"}}
MASTERS = {"w": torch.zeros(4, 64, dtype=torch.int16)}
MODEL = {"w": torch.ones(4, 64, dtype=torch.bfloat16)}


def forge(folder: Path, *, encodings: Mapping[str, Any], **state: Mapping[str, Any]) -> None:
    """Save tensors as they are, and claim that they are encoded."""
    uc.save(folder, **state, options=QUICK)  # type: ignore[arg-type]

    def edit(manifest: dict[str, Any]) -> None:
        for part, records in encodings.items():
            manifest["parts"][part]["encodings"] = records

    edit_manifest(folder, edit)


def fp32_targets() -> State:
    return {
        "optimizer": {name: torch.zeros(4, 64) for name in ("w/exp_avg", "w/exp_avg_sq")},
        "master_weights": {"w": torch.zeros(4, 64)},
    }


def check_refused(folder: Path, error: type[Exception], message: str) -> None:
    """One rank and two ranks raise it, and no target changes."""
    targets = [fp32_targets() for _ in range(2)]
    parts = [part for part in targets[0] if (folder / f"{part}.safetensors").exists()]

    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.load(folder, **{part: targets[comm.rank][part] for part in parts})

    for world in (1, 2):
        for result in try_ranks(world, act):
            assert isinstance(result, error), result
            assert re.search(message, str(result)), str(result)
        tensors = [t for target in targets for part in target.values() for t in part.values()]
        assert not any(tensor.any() for tensor in tensors)


def moments(encodings: Mapping[str, Any] = O1, **changes: Any) -> dict[str, Any]:
    tensors = {**MOMENTS, **{f"w/{name.replace('__', '.')}": t for name, t in changes.items()}}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {"optimizer": kept, "encodings": {"optimizer": encodings}}


def filled(value: float, shape: tuple[int, int]) -> torch.Tensor:
    scales = torch.ones(shape, dtype=torch.bfloat16)
    scales[-1, -1] = value
    return scales


NAN, INF = float("nan"), float("inf")
LONG = {**O1, "exp_avg": {"name": "signed-sqrt-8", "row_lengths": {"w/exp_avg": 65}}}
HOSTILE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": (moments({"exp_avg": {"name": "zip-9"}}), uc.FormatError, "'zip-9'"),
    "nan": (moments(exp_avg__scale=filled(NAN, (4, 1))), uc.FormatError, "w/exp_avg: .*scales"),
    "inf": (moments(exp_avg_sq__scale=filled(INF, (4, 2))), uc.FormatError, "exp_avg_sq: .*scale"),
    "negative": (moments(exp_avg__scale=filled(-1, (4, 1))), uc.FormatError, "w/exp_avg: .*scale"),
    "order": (moments(exp_avg_sq__scale=filled(0.5, (4, 2))), uc.FormatError, "order"),
    "no scales": (moments(exp_avg__scale=None), uc.FormatError, "w/exp_avg: got U8.*with none"),
    "wrong scales": (moments(exp_avg__scale=torch.ones(4, 1)), uc.FormatError, "F32"),
    "wrong codes": (moments(exp_avg=torch.zeros(4, 64)), uc.FormatError, "w/exp_avg: got F32"),
    "wrong rows": (moments(exp_avg=torch.zeros(3, 64).byte()), uc.FormatError, "w/exp_avg: got U8"),
    "wrong length": (moments(LONG), uc.FormatError, "w/exp_avg: got U8"),
    "no model": (
        {"master_weights": MASTERS, "encodings": {"master_weights": REF16}},
        uc.IncompleteError,
        "master_weights:w: .*model:w, which is missing",
    ),
    "model in float16": (
        {
            "model": {"w": MODEL["w"].half()},
            "master_weights": MASTERS,
            "encodings": {"master_weights": REF16},
        },
        uc.FormatError,
        "got F16",
    ),
    "model of another shape": (
        {
            "model": {"w": MODEL["w"].T.contiguous()},
            "master_weights": MASTERS,
            "encodings": {"master_weights": REF16},
        },
        uc.FormatError,
        r"got BF16 \[64, 4\]",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_tensors_are_refused_before_a_target_changes(case: str, tmp_path: Path) -> None:
    forgery, error, message = HOSTILE[case]
    forge(tmp_path / "c", **forgery)
    check_refused(tmp_path / "c", error, message)


EXCEPTIONS: dict[str, dict[str, Any]] = {
    "unknown tensor": {"v.index": np.array([1]), "v.value": np.ones(1, np.float32)},
    "outside": {"w/exp_avg.index": np.array([256]), "w/exp_avg.value": np.ones(1, np.float32)},
    "other lengths": {"w/exp_avg.index": np.array([1]), "w/exp_avg.value": np.ones(2, np.float32)},
}


@pytest.mark.parametrize("case", EXCEPTIONS)
def test_hostile_exceptions_are_refused_before_a_target_changes(case: str, tmp_path: Path) -> None:
    folder, body = tmp_path / "c", save(EXCEPTIONS[case])
    forge(folder, **moments())
    record = outliers_record("optimizer", body)
    (folder / record.file).write_bytes(body)
    edit_manifest(
        folder,
        lambda manifest: manifest["parts"]["optimizer"].update(exceptions=record.model_dump()),
    )
    check_refused(folder, uc.FormatError, f"{record.file}: ")
    for content in (body[:-1], bytes(len(body)), None):
        (folder / record.file).unlink()
        if content is not None:
            (folder / record.file).write_bytes(content)
        assert record.file in uc.verify(folder).problems[0]
        with pytest.raises(uc.CheckpointError, match=record.file):
            uc.load(folder, optimizer=fp32_targets()["optimizer"])
        (folder / record.file).write_bytes(body)


def test_the_model_of_a_checkpoint_with_an_unknown_encoding_loads(tmp_path: Path) -> None:
    forgery = moments({"exp_avg": {"name": "zip-9"}})
    forge(tmp_path / "c", model=MODEL, **forgery)
    model = {"w": torch.zeros_like(MODEL["w"])}
    uc.load(tmp_path / "c", model=model, options=uc.LoadOptions(parts=("model",)))
    assert torch.equal(model["w"], MODEL["w"])


def test_a_plain_source_has_no_view_around_it(tmp_path: Path) -> None:
    uc.save(tmp_path / "c", model=MODEL, options=QUICK)
    source = open_source(str(tmp_path / "c"))
    assert decode_source(source, label="") is source
    source.close()
