"""The outliers file of a part: elements that an encoding cannot hold, by position and value.

For each tensor that has any, `<fqn>.index` is their flat indices in the global tensor, ascending,
and `<fqn>.value` their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.errors import FormatError
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.header import Entry
from unified_ckpt.format.manifest_fields import NamedFile

# The flat indices of some elements of a tensor, ascending, and the bits of their float32 values.
Elements = tuple[NDArray[np.int64], NDArray[np.uint32]]

_INDEX, _VALUE = ".index", ".value"
MIN_RATIO = 64  # elements for each outlier; a tensor with more outliers is stored plain


def is_too_many(count: int, shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape with `count` outliers is stored plain."""
    return count > max(prod(shape) // MIN_RATIO, 1)


def join_elements(elements: Iterable[Elements]) -> Elements:
    """Join elements of one tensor, in any order; an element that occurs twice is kept once."""
    indices, values = zip(*elements, strict=True)
    joined, first = np.unique(np.concatenate(indices), return_index=True)
    return joined, np.concatenate(values)[first]


def encode_outliers(elements_by_fqn: Mapping[str, Elements]) -> bytes:
    """Return the bytes of a part's outliers file."""
    arrays: dict[str, NDArray[np.int64] | NDArray[np.uint32]] = {}
    for fqn, (indices, values) in elements_by_fqn.items():
        arrays |= {fqn + _INDEX: indices.astype("<i8"), fqn + _VALUE: values.astype("<u4")}
    items = header.file_order(
        (name, "I64" if name.endswith(_INDEX) else "F32", array.shape)
        for name, array in arrays.items()
    )
    header_bytes, _ = header.encode_header(items)
    return b"".join([header_bytes, *(arrays[name].tobytes() for name, _, _ in items)])


def outliers_record(part: str, body: bytes) -> NamedFile:
    """Return the manifest's record of a part's outliers file with this content."""
    name = names.outliers_name(part)
    header_nbytes = header.header_nbytes(body, file_size=len(body), file=name)
    return NamedFile(
        file=name,
        nbytes=len(body),
        header_crc=f"{digests.crc(body[:header_nbytes]):016x}",
        crc=f"{digests.crc(body):016x}",
    )


def parse_outliers(
    body: bytes, shapes: Mapping[str, Sequence[int]], *, file: str, others: bool = False
) -> dict[str, Elements]:
    """Return the outliers of each tensor that has any.

    `shapes`: of the encoded tensors of the part. `others`: leave out those of other tensors.
    FormatError, naming `file` and the tensor, for anything that is not as `encode_outliers`
    writes it.
    """
    entries = header.parse_header(body, file_size=len(body), file=file)
    elements_by_fqn = {}
    for name in entries:
        fqn = name.rpartition(".")[0]
        if others and fqn not in shapes:
            continue
        pair = entries.get(fqn + _INDEX), entries.get(fqn + _VALUE)
        if fqn not in shapes or name not in (fqn + _INDEX, fqn + _VALUE):
            raise FormatError(
                f"{file}: got tensor {name!r}, expected {_INDEX} and {_VALUE} of encoded tensors"
            )
        if pair[0] is None or pair[1] is None:
            raise FormatError(f"{file}: {fqn}: got only {name!r}, expected {_INDEX} and {_VALUE}")
        if fqn not in elements_by_fqn:
            elements_by_fqn[fqn] = _parse_elements(
                body, pair[0], pair[1], prod(shapes[fqn]), label=f"{file}: {fqn}"
            )
    return elements_by_fqn


def _parse_elements(body: bytes, index: Entry, value: Entry, numel: int, *, label: str) -> Elements:
    kinds = index.dtype, value.dtype, len(index.shape), index.shape
    if kinds != ("I64", "F32", 1, value.shape):
        raise FormatError(
            f"{label}: got {index.dtype} {list(index.shape)} and {value.dtype} "
            f"{list(value.shape)}, expected I64 indices and as many F32 values"
        )
    indices = np.frombuffer(body[index.start : index.stop], "<i8")
    values = np.frombuffer(body[value.start : value.stop], "<u4")
    if len(indices) and not (
        indices[0] >= 0 and indices[-1] < numel and (np.diff(indices) > 0).all()
    ):
        raise FormatError(
            f"{label}: got indices of outliers that are not ascending or not below {numel}"
        )
    return indices, values
