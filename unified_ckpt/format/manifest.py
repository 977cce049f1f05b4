"""The manifest: what a checkpoint folder holds, written last. A folder without a valid one is no
checkpoint.

Grows with the tensors, never with the ranks. Knows names, sizes and trees of `codec`; reads no
file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.format.index import check_file_name
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.format.names import check_part_name, check_save_id, index_name

# a new field raises the minor version; a change that old readers would misread raises the major
FORMAT_VERSION = "1.3"

MAX_RANKS = 1 << 20  # of a save: tables of ranks are made from what a manifest says
_NO_CRC = "0" * 16  # what the digits of the manifest's own CRC are taken as while that is computed
_DIGITS = re.compile("[0-9a-f]{16}")
_MAX_SHOWN = 5
_SHOWN_CHARS = 80


def _validate_file_name(name: str) -> str:
    return _validate(check_file_name, name)


def _validate_part_name(name: str) -> str:
    return _validate(check_part_name, name)


def _validate_save_id(save_id: str) -> str:
    return _validate(check_save_id, save_id)


def _validate(check: Any, name: str) -> str:
    try:
        check(name)
    except FormatError as error:
        raise ValueError(str(error)) from None
    return name


def _validate_utc(text: str) -> str:
    offset = datetime.fromisoformat(text).utcoffset()
    if offset != timedelta(0):
        raise ValueError("needed a time in UTC, as in 2026-01-31T12:00:00+00:00")
    return text


FileName = Annotated[str, AfterValidator(_validate_file_name)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Crc = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # of 64 bits, lower-case hex


class _Record(BaseModel):
    # Unknown fields are of a newer minor version.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class FileRecord(_Record):
    """A safetensors file of a part: its bytes on disk, and the CRC of its header (prefix, JSON and
    padding).
    """

    nbytes: Size
    header_crc: Crc


class NamedFile(FileRecord):
    """A safetensors file that is no part's, and the CRC of all its bytes: it has no block digests."""

    file: FileName
    crc: Crc


class RankExtraFile(NamedFile):
    """The file of the per-rank extra state; `world_size` is the number of its entries. `table_crc`:
    of all bytes before the entries, among them the CRC of each, so that one can be proved alone.
    """

    world_size: Ranks
    table_crc: Crc

    @model_validator(mode="after")
    def _check_entries(self) -> RankExtraFile:
        if self.nbytes < 16 * self.world_size:
            raise ValueError(
                f"{self.world_size} entries need {16 * self.world_size} bytes or more; the file has {self.nbytes}"
            )
        return self


class DigestFile(_Record):
    """The file of the block digests, and the CRC of all its bytes."""

    file: FileName
    algorithm: str
    block_nbytes: Annotated[int, Field(ge=1)]
    nbytes: Size
    crc: Crc

    @property
    def is_supported(self) -> bool:
        """Whether this library can compare them."""
        return self.algorithm == digests.ALGORITHM and self.block_nbytes == digests.BLOCK_NBYTES

    def check_supported(self, folder: str) -> None:
        """FormatError for digests of another kind, of a folder `folder`."""
        if not self.is_supported:
            raise FormatError(
                f"{folder}/{self.file}: its digests are {self.algorithm[:_SHOWN_CHARS]!r} of {self.block_nbytes} bytes each; needed "
                f'{digests.ALGORITHM!r} of {digests.BLOCK_NBYTES}, or a newer unified_ckpt; LoadOptions(verify="off") loads without proof'
            )


class IndexFile(_Record):
    """The index of a part, and the CRC of all its bytes."""

    nbytes: Size
    crc: Crc

    @classmethod
    def from_bytes(cls, body: bytes) -> IndexFile:
        """The record of an index with these bytes."""
        return cls(nbytes=len(body), crc=f"{digests.crc(body):016x}")


class Part(_Record):
    """`total_nbytes` counts tensor bytes before any codec. `aliases` maps the name of a tied tensor
    to the name it is stored under.
    `index`: null for a part without files, which has none."""

    files: dict[FileName, FileRecord]
    index: IndexFile | None = None
    total_nbytes: Size
    aliases: dict[str, str] = {}
    codec: str | None = None

    @model_validator(mode="after")
    def _check_index(self) -> Part:
        if (self.index is None) != (not self.files):
            raise ValueError(
                "a part that has files needs the record of its index, and no other does"
            )
        return self

    @model_validator(mode="after")
    def _check_aliases(self) -> Part:
        for alias, stored in self.aliases.items():
            if stored in self.aliases:
                raise ValueError(
                    f"alias {alias!r} stands for {stored!r}, which is an alias too; needed a stored tensor"
                )
        return self


class ParamGroup(_Record):
    """One optimizer param group: parameter names, and its hyperparameters as a tree of `codec`.
    `optimizer`: its class; `masters`: the name of master weights in its state.
    """

    names: list[str]
    options: Any
    optimizer: str | None = None
    masters: str | None = None


class OptimizerRecord(_Record):
    """What of an optimizer is not tensors; `scalars` is a tree of `codec` by parameter name."""

    groups: list[ParamGroup]
    scalars: Any = None


class NodeGroupRecord(_Record):
    """Which of the folders of one save this is: `number` of `count`, by the ranks `ranks` of
    `world_size`. `totals`: of the whole save, by part: how many tensors, and their bytes.
    `replicas`: the numbers of the folders of which copies lie in `replicas/`.
    """

    number: Rank
    count: Ranks
    ranks: list[Rank]
    world_size: Ranks
    totals: dict[str, Annotated[list[Size], Field(min_length=2, max_length=2)]] = {}
    replicas: list[Rank] = []

    @model_validator(mode="after")
    def _check_numbers(self) -> NodeGroupRecord:
        if max([self.number, *self.replicas]) >= self.count:
            raise ValueError(f"number and copies need to be below count, {self.count}")
        if max(self.ranks, default=0) >= self.world_size:
            raise ValueError(f"ranks need to be below world_size, {self.world_size}")
        return self


class ConvertedFrom(_Record):
    """What a conversion was made of, and what its checks saw. `tensors`, `nbytes`, `digests`: by
    part; a digest is the CRC of the names, dtypes, shapes and block digests of all its tensors.
    `compared`: of how many tensors a second copy in the source was compared, and found equal;
    `verified`: of how many the source's own digests were.
    """

    format: str
    path: str
    save_id: str | None = None
    options: dict[str, Any] = {}
    tensors: dict[str, Size] = {}
    nbytes: dict[str, Size] = {}
    digests: dict[str, Crc] = {}
    compared: Size = 0
    verified: Size = 0
    notes: list[str] = []


class Manifest(_Record):
    """The commit record. `created` is ISO 8601 in UTC; `extra` is a tree of `codec`, `modules` one
    of the modules' own extra state by name; `mesh` is for people and never needed to load;
    `seconds`: from call to commit; `metrics`: the caller's, by which retention knows the best;
    `objects`: where `extra` and `rank_extra` hold the state of an object.
    `omitted_parts`: of the state that was saved, those that were left out on purpose.
    `attached`: paths of the files that were in the folder at the commit and are not the engine's.
    """

    format_version: str = FORMAT_VERSION
    save_id: Annotated[str, AfterValidator(_validate_save_id)]
    step: Size | None = None
    created: Annotated[str, AfterValidator(_validate_utc)]
    world_size: Ranks
    seconds: Annotated[float, Field(ge=0)] | None = None
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}
    mesh: dict[str, Any] = {}
    parts: dict[Annotated[str, AfterValidator(_validate_part_name)], Part]
    omitted_parts: list[str] = []
    digests: DigestFile | None = None
    extra_file: NamedFile | None = None
    rank_extra: RankExtraFile | None = None
    node_group: NodeGroupRecord | None = None
    optimizer: OptimizerRecord | None = None
    modules: Any = None
    extra: Any = None
    objects: list[str] = []
    converted_from: ConvertedFrom | None = None
    attached: list[str] = []

    @model_validator(mode="after")
    def _check_files_unique(self) -> Manifest:
        counts = Counter(self.files())
        duplicates = [file for file, count in counts.items() if count > 1]
        if duplicates:
            raise ValueError(
                f"file {duplicates[0]!r} is named twice; needed one owner for each file"
            )
        return self

    def files(self) -> list[str]:
        """Every file of the checkpoint but the manifest itself."""
        part_files = [file for part in self.parts.values() for file in part.files]
        return [*part_files, *self.indexes(), *(record.file for record in self.auxiliary_files())]

    def indexes(self) -> dict[str, IndexFile]:
        """The indexes of the parts, by file name."""
        return {
            index_name(name): part.index
            for name, part in self.parts.items()
            if part.index is not None
        }

    def auxiliary_files(self) -> list[NamedFile | DigestFile]:
        """The files beside the parts' that have one CRC of all their bytes: digests first, by which
        the parts' are proved.
        """
        return [
            record
            for record in (self.digests, self.extra_file, self.rank_extra)
            if record is not None
        ]


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with one line per field, and its own CRC as the last. Raises FormatError for a tree that
    JSON cannot hold: trees come from
    `codec.encode`."""
    try:
        fields = [
            f'"{name}": {json.dumps(value, allow_nan=False)}'
            for name, value in manifest.model_dump().items()
        ]
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"the manifest holds a value that JSON cannot: {error}") from None
    return add_crc(("{\n" + ",\n".join([*fields, f'"crc": "{_NO_CRC}"']) + "\n}\n").encode())


def add_crc(encoded: bytes) -> bytes:
    """The JSON of a manifest whose last field is a `crc` of zeros, with the digits in their place."""
    before, _, after = encoded.rpartition(_NO_CRC.encode())
    return before + f"{digests.crc(encoded):016x}".encode() + after


def parse_manifest(encoded: bytes, *, file: str) -> Manifest:
    """Raises FormatError naming `file` and the field for anything but a valid manifest of this
    major format version, IntegrityError for one whose bytes are not those that were written.
    """
    content = parse_json(encoded, file=file)
    if not isinstance(content, dict):
        raise FormatError(f"{file}: found a JSON {type(content).__name__}; needed an object")
    _check_crc(
        encoded, content.get("crc"), file
    )  # of any version: a digit of that may be what is damaged
    _check_version(content, file)
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise FormatError(f"{file}: {_validation_text(error)}") from None


def is_other_version(encoded: bytes) -> bool:
    """Whether this is a manifest that another major version of the format wrote: a checkpoint,
    though not one that we can read.
    """
    try:
        content = parse_json(encoded, file="")
        version = content.get("format_version") if isinstance(content, dict) else None
        _check_crc(encoded, content.get("crc") if isinstance(content, dict) else None, "")
    except (FormatError, IntegrityError):
        return False
    major = version.partition(".")[0] if isinstance(version, str) else ""
    return major.isdecimal() and major != FORMAT_VERSION.partition(".")[0] and "save_id" in content


def _check_crc(encoded: bytes, recorded: object, file: str) -> None:
    if not isinstance(recorded, str) or not _DIGITS.fullmatch(recorded):
        raise FormatError(
            f"{file}: crc is {ascii(recorded)[:_SHOWN_CHARS]}; needed 16 lower-case hex digits"
        )
    before, _, after = encoded.rpartition(recorded.encode())  # it is the last field
    computed = 0
    for piece in (before, _NO_CRC.encode(), after):
        computed = digests.crc(piece, computed)
    if f"{computed:016x}" != recorded:
        raise IntegrityError(
            f"{file}: is not the file that was written: it has CRC {computed:016x}; needed {recorded}; a copy of the checkpoint mends it "
            "(`unified-ckpt verify --repair --from`)"
        )


def _check_version(content: dict[str, Any], file: str) -> None:
    version = content.get("format_version")
    major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (dot and _is_number(major) and _is_number(minor)):
        raise FormatError(
            f"{file}: format_version is {version!r}; needed a version like {FORMAT_VERSION!r}"
        )
    major_read = FORMAT_VERSION.partition(".")[0]
    if int(major) > int(major_read):
        versions = content.get("versions")
        writer = versions.get("unified-ckpt") if isinstance(versions, dict) else None
        newer = (
            f"unified_ckpt {writer!s:.40}, which wrote it, or newer"
            if writer
            else "a newer unified_ckpt"
        )
        raise FormatError(
            f"{file}: format version is {version}, this unified_ckpt reads {major_read}.x; install {newer}"
        )
    if int(major) < int(major_read):
        raise FormatError(
            f"{file}: format version is {version}, of which this unified_ckpt knows nothing; needed {major_read}.x"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < len(str(2**31))


def _validation_text(error: ValidationError) -> str:
    reasons = []
    for item in error.errors(include_url=False, include_context=False)[:_MAX_SHOWN]:
        field = ".".join(str(step) for step in item["loc"]) or "manifest"
        value_text = (
            "" if item["type"] == "missing" else f"; found {ascii(item['input'])[:_SHOWN_CHARS]}"
        )
        reasons.append(f"{field}: {item['msg'].removeprefix('Value error, ')}{value_text}")
    more_count = error.error_count() - len(reasons)
    return "; ".join(reasons) + (f"; and {more_count} more" if more_count > 0 else "")
