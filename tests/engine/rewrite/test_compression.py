"""Conversions to and from compressed checkpoints: the same bytes, whoever writes, however often."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.engine.cluster.simulated_nodes import on_node
from tests.support.engine.compressed import (
    QUICK,
    save_compressed,
    stored_contents,
    stored_files,
    trained_state,
)
from tests.support.engine.compressed_cases import stored_tensors
from tests.support.equality import same
from tests.support.format.decoders import decode_folder
from tests.support.format.manifests import edit_manifest
from tests.support.harness import run_ranks, try_ranks
from unified_ckpt.cli.main import main
from unified_ckpt.engine.folder.copy import copy_checkpoint
from unified_ckpt.engine.rewrite.convert import ConvertReport, ConvertRequest, convert_source
from unified_ckpt.engine.rewrite.merge import MergeOptions, merge_paths
from unified_ckpt.foreign.open import open_source
from unified_ckpt.format.encoded_tensors import Compression
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.topology import Topology
from unified_ckpt.runtime.storage.storage import LocalStorage

FORMS: tuple[Compression, ...] = ("lossless", "O1", "O2")
DEFAULT_O1, DEFAULT_O2 = (
    [pytest.param(form, marks=[] if form == default else pytest.mark.slow) for form in FORMS]
    for default in ("O1", "O2")
)
# Several files, several blocks, runs of one row and of many, short last blocks.
SHAPES = {"w": (700, 1111), "long": (2, 600_011), "v": (130,), "conv": (4, 3, 3)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "c"
    uc.save(folder, **trained_state(SHAPES), options=QUICK)
    return folder


def convert(
    source: Path, target: Path, compression: Compression, /, **options: Any
) -> ConvertReport:
    return uc.convert(source, target, compression=compression, fsync=False, **options)


def convert_on_ranks(world: int, source: Path, target: Path, compression: Compression) -> None:
    def act(comm: Comm) -> None:
        request = ConvertRequest(
            source_path=str(source),
            recorded_options={},
            max_file_bytes=3 << 20,
            if_exists="error",
            timeout_seconds=60,
            compression=compression,
        )
        opened = open_source(str(source))
        topology = Topology.shared_folder(comm.rank, [0] * world)
        storage = LocalStorage(str(target.parent))
        convert_source(comm, opened, storage, target.name, request, topology=topology)
        opened.close()

    run_ranks(world, act)


def merge_all(comm: Comm, sources: Sequence[Path], target: Path, nodes: Sequence[int]) -> None:
    """Collective. Merge the folders of this node with those of others."""
    merge_paths(
        comm,
        [str(source) for source in sources],
        LocalStorage(str(target.parent)),
        target.name,
        MergeOptions(max_file_bytes=1 << 30, if_exists="error", timeout_seconds=60),
        topology=Topology.shared_folder(comm.rank, nodes),
    )


@pytest.mark.parametrize("form", DEFAULT_O1)
def test_any_number_of_ranks_writes_the_same_bytes(
    form: Compression, plain: Path, tmp_path: Path
) -> None:
    for world in (1, 2, 3):
        convert_on_ranks(world, plain, tmp_path / f"{world}", form)
    files = stored_files(tmp_path / "1")
    assert len(files) > 5
    assert files == stored_files(tmp_path / "2") == stored_files(tmp_path / "3")
    assert uc.verify(tmp_path / "3", deep=True).ok
    decoded = tmp_path / "decoded"
    convert_on_ranks(2, tmp_path / "2", decoded, "none")
    convert_on_ranks(2, decoded, tmp_path / "again", form)
    assert stored_files(tmp_path / "again") == files
    for name, compression in (("copy", form), ("back", "none")):
        report = convert(tmp_path / "1", tmp_path / name, compression)
        assert report.verified == sum(report.tensors.values()), "digests of all were checked"
    assert stored_tensors(tmp_path / "copy") == stored_tensors(tmp_path / "1")
    copied, back = stored_files(tmp_path / "copy"), stored_files(tmp_path / "back")
    assert form != "lossless" or back == stored_files(plain)
    assert len(copied["master_weights.safetensors"]) < 0.51 * len(
        back["master_weights.safetensors"]
    )


def test_nodes_merge_a_shared_compressed_folder(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "c", "O2")
    run_ranks(2, lambda comm: merge_all(comm, [tmp_path / "c"], tmp_path / "merged", [0, 1]))
    files = stored_files(tmp_path / "c")
    assert len(files) > 5
    assert stored_files(tmp_path / "merged") == files
    first, second = (
        json.loads((tmp_path / name / "unified_checkpoint.json").read_text())["parts"]
        for name in ("c", "merged")
    )
    assert first["optimizer"]["encodings"]
    assert first == second


@pytest.mark.parametrize("form", DEFAULT_O2)
def test_folders_of_nodes_merge_to_what_a_shared_folder_has(
    form: Compression, tmp_path: Path
) -> None:
    """A merge keeps the stored bytes, a conversion decodes them and encodes them again."""
    shapes = {**SHAPES, "v": (4, 130)}
    rules = {name: {"dp": 0} for name in ("w", "v", "conv")}
    layout = uc.Layout({"dp": 4}, rules, shapes)
    options = QUICK.model_copy(update={"compression": form, "timeout_seconds": 60.0})
    reports: dict[str, list[uc.SaveReport]] = {"shared": [], "own": []}

    def act(comm: Comm) -> None:
        state = trained_state(shapes)
        for tensors in state.values():
            for name, tensor in tensors.items():
                if name.partition("/")[0] in rules and tensor.shape:
                    tensors[name] = tensor.chunk(4)[comm.rank].clone()
        nodes = [0, 0, 1, 1]
        with on_node(comm, nodes) as checkpointer:
            own = tmp_path / f"node-{nodes[comm.rank]}" / "c"
            for kind, path in (("shared", tmp_path / "c"), ("own", own)):
                report = checkpointer.save(path, **state, layout=layout, options=options)
                reports[kind].append(report)
        merge_all(comm, [own], tmp_path / "merged-by-nodes", nodes)

    run_ranks(4, act)
    assert {report.plain_tensors for kind in reports.values() for report in kind} == {0}
    assert {report.outliers for report in reports["own"]} == {reports["shared"][0].outliers}
    files = stored_contents(tmp_path / "c")
    assert "master_weights.exceptions.safetensors" in files
    folders = [tmp_path / f"node-{node}" / "c" for node in (0, 1)]
    assert any("_shards" in name for name in stored_files(folders[1]))
    run_ranks(1, lambda comm: merge_all(comm, folders, tmp_path / "merged", [0]))
    uc.convert(folders, tmp_path / "again", compression=form, compare=False, fsync=False)
    merged, again = (stored_contents(tmp_path / name) for name in ("merged", "again"))
    assert merged == again == files
    assert stored_tensors(tmp_path / "merged-by-nodes") == stored_tensors(tmp_path / "c")


def test_lossy_forms_change_moments_only(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "c", "O1")
    with uc.open(plain) as first, uc.open(tmp_path / "c") as second:
        for part in first.parts:
            for name in first[part]:
                before, after = first[part][name][...], second[part][name][...]
                if not name.endswith(("/exp_avg", "/exp_avg_sq")) or before.shape[-1] < 32:
                    assert same(after, before), (part, name)
                    continue
                finite = before.isfinite() & (before >= (0 if name.endswith("sq") else before))
                assert same(after[~finite], before[~finite]), name
                error = (after - before)[finite].norm() / before[finite].norm()
                assert 0 < error < 0.02, name


def test_tensors_of_many_exceptions_are_stored_plain(tmp_path: Path) -> None:
    state = trained_state({"good": (64, 64), "drifted": (64, 64), "few": (64, 64)})
    state["model"]["drifted"] += 1
    state["model"]["few"][0] += 1
    state["optimizer"]["good/exp_avg"][:9] = float("nan")
    save_compressed(tmp_path / "c", "O1", state)
    source = open_source(str(tmp_path / "c")).stored  # type: ignore[attr-defined]
    dtypes = {
        name: spec.dtype for name, spec in source.specs("master_weights", state["model"]).items()
    }
    assert dtypes == {"good": "I16", "drifted": "F32", "few": "I16"}
    moments = source.specs("optimizer", source.names("optimizer"))
    assert moments["good/exp_avg"].dtype == "F32"
    assert moments["good/exp_avg_sq"].dtype == "U8"
    assert "good/exp_avg.scale" not in moments
    source.close()
    expected = decode_folder(tmp_path / "c")
    with uc.open(tmp_path / "c") as opened:
        for (part, name), tensor in expected.items():
            assert same(opened[part][name][...], tensor), (part, name)
        for name, master in state["master_weights"].items():
            assert same(opened["master_weights"][name][...], master), name


def test_masters_that_differ_from_the_model_are_reported(tmp_path: Path) -> None:
    state = trained_state()
    state["model"]["wide"][5, 5] += 1
    uc.save(tmp_path / "c", **state, options=QUICK)
    for form in ("none", *FORMS):
        with pytest.raises(uc.IntegrityError, match="wide: 1 of 309000 elements differ"):
            convert(tmp_path / "c", tmp_path / "new", form)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_parts_and_dtypes_are_chosen_before_encoding(plain: Path, tmp_path: Path) -> None:
    """Masters are plain where their model is not stored, or in another dtype."""
    convert(plain, tmp_path / "parts", "O2", parts=("model", "optimizer"))
    convert(plain, tmp_path / "half", "O2", model_dtype="float16", compare=False)
    convert(plain, tmp_path / "c", "O2")
    whole = stored_files(tmp_path / "c")
    for name in ("parts", "half"):
        files = stored_files(tmp_path / name)
        assert files["optimizer.safetensors"] == whole["optimizer.safetensors"]
    half = stored_files(tmp_path / "half")
    assert half["master_weights.safetensors"] == stored_files(plain)["master_weights.safetensors"]
    assert "master_weights.exceptions.safetensors" not in half
    some = convert(tmp_path / "c", tmp_path / "some", "none", parts=("model", "optimizer"))
    assert some.verified == sum(some.tensors.values())


@pytest.mark.parametrize("form", ["none", *FORMS])
def test_digests_of_changed_tensors_are_counted(form: Compression, tmp_path: Path) -> None:
    """The digests of a source are checked before tensors are renamed, computed or cast."""
    save_compressed(tmp_path / "c", form)
    rules: tuple[dict[str, Any], ...] = (
        {"match": "wide", "steps": [{"transpose": [0, 1]}], "to": "tall"},
        {"match": "*", "to": "module.{1}"},
    )
    source = uc.SourceOptions(rename=rules)
    renamed = convert(tmp_path / "c", tmp_path / "renamed", "none", source=source, compare=False)
    cast = convert(tmp_path / "c", tmp_path / "cast", "none", model_dtype="float16", compare=False)
    for report in (renamed, cast):
        assert report.verified == sum(report.tensors.values())
    plain = {name: torch.ones(3) for name in ("a", "b")}
    (tmp_path / "without").mkdir()
    save_file(plain, tmp_path / "without" / "model.safetensors")
    source = uc.SourceOptions(rename=({"match": "a", "to": "c"},))
    report = convert(tmp_path / "without", tmp_path / "plain", "none", source=source)
    assert report.verified == 0, "it has no digests"


def test_copies_repairs_and_replicas_have_the_stored_bytes(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "c", "O1")
    storage = LocalStorage(str(tmp_path))
    copy_checkpoint(
        str(tmp_path / "c"),
        storage,
        "copy",
        if_exists="error",
        on_progress=lambda _: None,
    )
    files = stored_files(tmp_path / "c")
    assert stored_files(tmp_path / "copy") == files
    for name, body in files.items():
        path = tmp_path / "copy" / name
        flip(path, -1)
        assert not uc.verify(tmp_path / "copy", deep=True).ok, name
        assert uc.repair(tmp_path / "copy", [tmp_path / "c"]).problems == (), name
        assert path.read_bytes() == body


def test_a_part_is_deleted_with_its_exceptions(plain: Path, tmp_path: Path) -> None:
    for number, suffixes in enumerate(("safetensors*", "*safetensors*")):
        folder = tmp_path / f"{number}"
        convert(plain, folder, "O1")
        for path in folder.glob(f"optimizer.{suffixes}"):
            path.unlink()
        assert uc.verify(folder, deep=True).ok
        with uc.open(folder) as source:
            assert source.parts == ("master_weights", "model")
    for path in folder.glob("model.*"):
        path.unlink()
    problem = "master_weights is stored beside the part model, which was deleted"
    assert uc.verify(folder).problems == (problem,)
    with (
        uc.open(folder) as source,
        pytest.raises(uc.IncompleteError, match=r"master_weights:.* is stored beside model:"),
    ):
        source["master_weights"]["w"][...]


def test_other_formats_get_decoded_tensors(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "c", "lossless")
    files = []
    for source in (plain, tmp_path / "c"):
        uc.convert(source, tmp_path / "state.pt", to="torch", fsync=False, compare=False)
        files.append((tmp_path / "state.pt").read_bytes())
        (tmp_path / "state.pt").unlink()
    assert files[0] == files[1]
    with pytest.raises(uc.FormatError, match="compression: got 'O1' for 'dcp'"):
        convert(plain, tmp_path / "dcp", "O1", to="dcp")


def test_an_unknown_encoding_converts_to_nothing(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "c", "O1")
    edit_manifest(
        tmp_path / "c",
        lambda manifest: manifest["parts"]["optimizer"]["encodings"]["exp_avg"].update(name="new"),
    )
    for result in try_ranks(2, lambda _: convert(tmp_path / "c", tmp_path / "d", "none")):
        assert isinstance(result, uc.FormatError)
    assert not (tmp_path / "d").exists()


def test_the_command_line_converts_both_ways(plain: Path, tmp_path: Path) -> None:
    source, folder, back = str(plain), str(tmp_path / "c"), str(tmp_path / "back")
    assert main(["convert", source, folder, "--compression", "lossless", "--no-fsync"]) == 0
    assert main(["convert", folder, back, "--no-fsync"]) == 0
    assert stored_files(tmp_path / "back") == stored_files(plain)
