from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.format.manifests import sealed
from unified_ckpt.core.sharding.rank_mesh import RankMesh
from unified_ckpt.errors import FormatError
from unified_ckpt.format.codec import MAX_DEPTH, decode, encode
from unified_ckpt.format.manifest import (
    FORMAT_VERSION,
    ConvertedFrom,
    Manifest,
    NodeGroupRecord,
    OptimizerRecord,
    ParamGroup,
    Part,
    encode_manifest,
    has_valid_crc,
    parse_manifest,
)
from unified_ckpt.format.manifest_fields import (
    DigestFile,
    FileRecord,
    IndexFile,
    NamedFile,
    RankExtraFile,
    RankMeshRecord,
    rank_mesh_record,
)

FILE = "unified_checkpoint.json"
CRC = "0123456789abcdef"
NODE_GROUP = {
    "number": 0,
    "count": 4,
    "ranks": [0, 1],
    "world_size": 8,
    "totals": {},
    "replicas": [],
}


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "save_id": "a1",
        "step": 7,
        "created": "2026-01-31T12:00:00+00:00",
        "world_size": 8,
        "versions": {"unified-ckpt": "1.2.3", "torch": "2.13.0"},
        "mesh": {"dp": 4, "tp": 2},
        "rank_mesh": rank_mesh_record(RankMesh.row_major([("dp", 4), ("tp", 2)])),
        "parts": {
            "model": Part(
                files={"model.safetensors": FileRecord(nbytes=100, header_crc=CRC)},
                index=IndexFile.from_bytes(b"{}"),
                total_nbytes=12,
                aliases={"lm_head.weight": "embed.weight"},
            )
        },
        "digests": DigestFile(
            file="digests.safetensors",
            algorithm="crc64nvme",
            block_nbytes=1 << 20,
            nbytes=40,
            crc=CRC,
        ),
        "extra_file": NamedFile(file="extra.safetensors", nbytes=40, header_crc=CRC, crc=CRC),
        "rank_extra": RankExtraFile(
            file="rank_extra.safetensors",
            nbytes=400,
            header_crc=CRC,
            crc=CRC,
            world_size=8,
            table_crc=CRC,
        ),
        "optimizer": OptimizerRecord(
            groups=[
                ParamGroup(
                    names=["a.weight"], options=encode({"lr": 0.1, "betas": (0.9, 0.999)})[0]
                )
            ]
        ),
        "extra": encode({"best": math.inf, "milestones": {3: 1}})[0],
    }
    return Manifest(**{**fields, **changes})


def changed(path: str, value: Any) -> bytes:
    tree = json.loads(encode_manifest(manifest()))
    *steps, last = path.split("/")
    node = tree
    for step in steps:
        node = node[int(step) if isinstance(node, list) else step]
    node[last] = value
    return sealed(tree)


def test_round_trip() -> None:
    written = manifest()
    parsed = parse_manifest(encode_manifest(written), file=FILE)
    assert parsed == written
    assert parsed.optimizer is not None
    assert decode(parsed.optimizer.groups[0].options, {}) == {"lr": 0.1, "betas": (0.9, 0.999)}
    assert decode(parsed.extra, {}) == {"best": math.inf, "milestones": {3: 1}}
    assert parsed.rank_mesh is not None
    assert parsed.rank_mesh.mesh() == RankMesh.row_major([("dp", 4), ("tp", 2)])
    assert rank_mesh_record(None) is None

    smallest = Manifest(save_id="a", created="2026-01-31T12:00:00Z", world_size=1, parts={})
    assert parse_manifest(encode_manifest(smallest), file=FILE) == smallest
    assert smallest.files() == []
    deep: Any = {"b": 1, "a": "\ud800"}
    for _ in range(MAX_DEPTH - 1):
        deep = {1: deep}
    body = encode_manifest(manifest(extra=encode(deep)[0]))
    parsed_deep = decode(parse_manifest(body, file=FILE).extra, {})
    assert repr(parsed_deep) == repr(deep), "with its order and depth"


def test_names_every_file_once() -> None:
    small = ["digests.safetensors", "extra.safetensors", "rank_extra.safetensors"]
    assert manifest().files() == ["model.safetensors", "model.safetensors.index.json", *small]
    with pytest.raises(ValidationError, match=r"got file 'model\.safetensors' twice"):
        manifest(extra_file=NamedFile(file="model.safetensors", nbytes=1, header_crc=CRC, crc=CRC))


def test_each_field_is_on_a_line() -> None:
    etags = {"model.safetensors": "d41d8cd98f00b204e9800998ecf8427e-2"}
    lines = encode_manifest(manifest(etags=etags, url="s3://b/c")).decode().splitlines()
    assert lines[1] == '"format_version": "1.0",'
    assert len(lines) == 2 + len(Manifest.model_fields) + 1
    assert lines[-4:-2] == [f'"etags": {json.dumps(etags)},', '"url": "s3://b/c",']
    on_disk = json.loads(encode_manifest(manifest()))
    assert not {"etags", "url"} & on_disk.keys(), "files on a disk have none"
    assert re.fullmatch('"crc": "[0-9a-f]{16}"', lines[-2])


@pytest.mark.parametrize(
    "path", ["new", "parts/model/new", "parts/model/files/model.safetensors/new", "digests/new"]
)
def test_unknown_fields_of_the_major_version_are_ignored(path: str) -> None:
    stored = json.loads(changed(path, {"a": 1}))
    stored["format_version"] = "1.7"
    assert parse_manifest(sealed(stored), file=FILE) == manifest(format_version="1.7")


def test_a_newer_major_version_names_the_library_that_wrote_it() -> None:
    newer = rf"{FILE}: got format version 2\.0, expected at most 1\.x: written by a newer version"
    with pytest.raises(FormatError, match=rf"{newer}, unified-ckpt 1\.2\.3; upgrade unified-ckpt"):
        parse_manifest(changed("format_version", "2.0"), file=FILE)
    with pytest.raises(FormatError, match=rf"{newer}; upgrade unified-ckpt"):
        parse_manifest(sealed({"format_version": "2.0", "versions": []}), file=FILE)


@pytest.mark.parametrize(
    "version",
    [None, 1, 1.0, "", "1", "1.", ".1", "a.b", "1.0.0", "-1.0", "0.9", "²1.0", "1." + "9" * 5000],
)
def test_invalid_versions_are_refused(version: Any) -> None:
    with pytest.raises(
        FormatError, match=rf"{FILE}: got format_version .*expected a version like '1\.0'"
    ):
        parse_manifest(changed("format_version", version), file=FILE)


@pytest.mark.parametrize(
    ("text", "bodies"),
    [
        (
            "not valid JSON",
            [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}', b'{"a": Infinity}'],
        ),
        ("got a JSON .*expected an object", [b"[]", b"null", b"3"]),
        ("got crc None, expected 16 lower-case hex digits", [b'{"format_version": "1.0"}']),
    ],
)
def test_text_that_is_no_manifest_is_refused(text: str, bodies: list[bytes]) -> None:
    for body in bodies:
        with pytest.raises(FormatError, match=f"{FILE}: {text}"):
            parse_manifest(body, file=FILE)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("save_id", "../a", r"save_id: save id: got '\.\./a'"),
        ("save_id", None, "save_id: "),
        ("step", -1, "step: .*got -1"),
        ("step", 1.0, "step: .*got 1.0"),
        ("step", True, "step: "),
        ("step", "7", "step: "),
        ("created", "today", "created: "),
        ("created", "2026-01-31T12:00:00", "created: expected a time in UTC"),
        ("created", "2026-01-31T12:00:00+02:00", "created: expected a time in UTC"),
        ("world_size", 0, "world_size: "),
        ("rank_mesh", {"dims": []}, "manifest: got rank_mesh of 1 ranks, expected 8"),
        ("rank_mesh/dims/1/size", 1, "rank_mesh: got mesh dim 'tp' of size 1 and stride 1"),
        ("rank_mesh/dims/1/stride", 2, "rank_mesh: got mesh dim 'dp' of size 4 and stride 2"),
        ("rank_mesh/dims/0/size", 2**20, "rank_mesh: expected 1 to 1048576 ranks"),
        ("rank_mesh/dims/0/stride", 0, "rank_mesh.dims.0.stride: "),
        ("versions", {"torch": 2}, "versions.torch: "),
        ("parts", None, "parts: "),
        ("parts/extra", {"files": {}, "total_nbytes": 0}, "parts.extra.*reserved for a file"),
        ("parts/a.b", {"files": {}, "total_nbytes": 0}, "parts.a.b.*expected 1 to 64"),
        (
            "parts/model/index",
            None,
            "parts.model: expected the record of an index",
        ),
        (
            "parts/model/files",
            {},
            "parts.model: expected the record of an index",
        ),
        ("parts/model/index/crc", "zz", "parts.model.index.crc: "),
        ("parts/model/total_nbytes", -1, "parts.model.total_nbytes: .*got -1"),
        ("parts/model/total_nbytes", 2**63, "parts.model.total_nbytes: "),
        (
            "parts/model/files",
            {"../x": {"nbytes": 1, "header_crc": CRC}},
            "parts.model.files.*leads out of the folder",
        ),
        (
            "parts/model/files",
            {"/etc/passwd": {"nbytes": 1, "header_crc": CRC}},
            "leads out of the folder",
        ),
        (
            "parts/model/files/model.safetensors/nbytes",
            -1,
            r"parts.model.files.model.safetensors.nbytes: .*got -1",
        ),
        ("parts/model/files/model.safetensors/header_crc", CRC.upper(), "header_crc: "),
        ("parts/model/files/model.safetensors/header_crc", CRC + "\n", "header_crc: "),
        (
            "parts/model/aliases",
            {"a": "b", "b": "c"},
            "parts.model: alias 'a': got 'b', which is an alias too",
        ),
        ("parts/model/aliases", {"a": 1}, "parts.model.aliases.a: "),
        ("digests/file", "a/b", "digests.file: .*leads out of the folder"),
        ("digests/block_nbytes", 0, "digests.block_nbytes: "),
        ("digests/crc", "zz", "digests.crc: "),
        ("extra_file/file", "..", "extra_file.file: .*leads out of the folder"),
        ("rank_extra/world_size", 0, "rank_extra.world_size: "),
        ("rank_extra/world_size", 2**62, "rank_extra.world_size: "),
        (
            "rank_extra/world_size",
            26,
            "rank_extra: got 400 bytes, expected at least 416 for 26 entries",
        ),
        ("world_size", 2**21, "world_size: .*less than or equal to 1048576"),
        ("step", 2**63, "step: "),
        (
            "node_group",
            {**NODE_GROUP, "number": 4},
            "node_group: expected number and replicas below count, 4",
        ),
        (
            "node_group",
            {**NODE_GROUP, "replicas": [4]},
            "node_group: expected number and replicas below count, 4",
        ),
        (
            "node_group",
            {**NODE_GROUP, "ranks": [8]},
            "node_group: expected ranks below world_size, 8",
        ),
        ("node_group", {**NODE_GROUP, "count": 2**62}, "node_group.count: "),
        ("rank_extra/file", "extra.safetensors", "got file 'extra.safetensors' twice"),
        ("optimizer/groups", [{"names": "abc", "options": {}}], "optimizer.groups.0.names: "),
        ("optimizer/groups", [{"options": {}}], "optimizer.groups.0.names: Field required"),
    ],
)
def test_every_field_is_checked_and_named(path: str, value: Any, reason: str) -> None:
    with pytest.raises(FormatError, match=f"(?s)^{FILE}: .*{reason}"):
        parse_manifest(changed(path, value), file=FILE)


@pytest.mark.parametrize(
    "fields", [{}, {"format_version": "2.0"}, {"format_version": None}, {"world_size": -1}]
)
def test_has_valid_crc_accepts_any_undamaged_manifest(fields: dict[str, object]) -> None:
    """Its content does not matter: an undamaged manifest belongs to a checkpoint."""
    body = sealed({**json.loads(encode_manifest(manifest())), **fields})
    assert has_valid_crc(body)
    assert not has_valid_crc(body.replace(b'"save_id"', b'"save_ie"'))
    assert not has_valid_crc(body[:-4])
    assert not has_valid_crc(b"[]")


@pytest.mark.parametrize("path", ["save_id", "parts/model/files", "extra/best"])
def test_a_key_that_occurs_twice_is_refused(path: str) -> None:
    """RFC 8259 does not define which of the two counts."""
    key = path.rpartition("/")[2]
    body = encode_manifest(manifest()).replace(
        f'"{key}":'.encode(), f'"{key}": null, "{key}":'.encode(), 1
    )
    with pytest.raises(FormatError, match=f"{FILE}: got key '{key}' twice in one object"):
        parse_manifest(body, file=FILE)


def test_many_errors_are_truncated() -> None:
    bad = {f"f{number}": {"nbytes": -1, "header_crc": CRC} for number in range(100)}
    with pytest.raises(FormatError, match=r"and 95 more$"):
        parse_manifest(changed("parts/model/files", bad), file=FILE)


@pytest.mark.parametrize("tree", [math.nan, (1, object()), {"a": b"x"}])
def test_trees_that_are_not_json_are_refused(tree: Any) -> None:
    with pytest.raises(FormatError, match="a value cannot be stored as JSON"):
        encode_manifest(manifest(extra=tree))


def test_format_page_names_every_manifest_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    records = (Manifest, Part, FileRecord, IndexFile, DigestFile, NamedFile, RankExtraFile)
    more = (OptimizerRecord, ParamGroup, NodeGroupRecord, ConvertedFrom, RankMeshRecord)
    fields = {field for record in (*records, *more) for field in record.model_fields}
    assert {field for field in fields if f"`{field}`" not in page} == set()
    assert f"version {FORMAT_VERSION}" in page
