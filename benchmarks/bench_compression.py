"""Measure the size and the error of encoded optimizer state, of small models that are trained here.

Run: python benchmarks/bench_compression.py [--forms O1,O2] [--steps 400] [--out FILE].

The reference state is a Llama of 0.8 M parameters; `trained_states.py` has the others. One JSON
line for each state and form, and on the reference state for each pair of bits of the first and the
second moment. What is encoded, and how, is what a save does.

- `bytes_per_param`: of the model in bfloat16 and both moments, with scales, without masters;
- `error`: of the update u = m / (sqrt(v) + eps), |u' - u| / |u|, L2 over all parameters;
  `worst_error`: of the tensor where it is largest, `worst`;
- `again`: tensors whose bytes differ when what was decoded is encoded again. Expected: 0;
- `encode_gb_per_s`, `decode_gb_per_s`: float32 bytes per CPU second, minima of many calls;
- `bound_bytes_per_param`: the least size at this error, see `gaussian_bound.py`.

A further line has the same for master weights beside the model. Peers on the reference state:

- byte planes and zstd level 1 (package zstandard) of the plain moments, which loses nothing;
- PaddleNLP's O1 and O2, in Paddle's orientation, as `--to paddle` writes them;
- torchao's 8-bit and 4-bit optimizer state, in blocks of its default size and of 64. It holds
  values, not encodings of rows, and leaves tensors under 4,096 elements as they are;
- bitsandbytes' 8-bit optimizer state, likewise.

A peer that is not installed has null in its figures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import get_args

import numpy as np
import torch
from common import write_rows
from gaussian_bound import Floats, bound_bytes, update
from trained_states import MODELS, State, train
from transformers.utils import logging

from unified_ckpt.core.sharding.shardings import spec_of
from unified_ckpt.foreign.paddle.export.quantize import Moment, QuantStage, dequantized
from unified_ckpt.foreign.paddle.quantized_moments import GROUP_ROWS
from unified_ckpt.format import encodings
from unified_ckpt.format.encoded_tensors import (
    MasterEncoding,
    MomentEncoding,
    choose_encodings,
)

REFERENCE = "llama"
MOMENTS = ("exp_avg", "exp_avg_sq")
RUNS = 30  # of a timed call
TIMED_SHAPE = (64, 1024)  # what one call encodes: its arrays stay in the cache

Roundtrip = Callable[[str, Floats], tuple[Floats, int]]  # -> what comes back, bytes in between
Columns = dict[str, object]


def gb_per_s(call: Callable[[], object], nbytes: int) -> float:
    """Time a call many times; return the best rate, in GB per CPU second."""
    seconds = []
    for _ in range(RUNS):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return round(nbytes / min(seconds) / 1e9, 2)


def parameters(state: State) -> list[str]:
    return [fqn for part, fqn in state if part == "master_weights"]


def moments_of(state: State, fqn: str) -> list[Floats]:
    return [state["optimizer", f"{fqn}/{moment}"].numpy() for moment in MOMENTS]


# ---- forms: what comes back of a moment, and its bytes


def choose(state: State, form: str) -> dict[str, MomentEncoding]:
    """Return the encoding of each moment that a save encodes. `form`: O1, O2, or bits as 6/5."""
    specs = {key: spec_of("F32", tuple(tensor.shape)) for key, tensor in state.items()}
    chosen = choose_encodings(specs, "O2" if form == "O2" else "O1")
    if "/" in form:
        bits = [int(number) for number in form.split("/")]
        makers = encodings.first_moment, encodings.second_moment
        by_moment = {
            moment: MomentEncoding(make(number))
            for moment, make, number in zip(MOMENTS, makers, bits, strict=True)
        }
        return {fqn: by_moment[fqn.rpartition("/")[2]] for _, fqn in chosen}
    return {fqn: e for (_, fqn), e in chosen.items() if isinstance(e, MomentEncoding)}


class Encoded:
    """Moments as a save encodes them. `again`: see above."""

    def __init__(self, chosen: Mapping[str, MomentEncoding]) -> None:
        self.chosen, self.again = chosen, 0

    def __call__(self, fqn: str, values: Floats) -> tuple[Floats, int]:
        encoding = self.chosen.get(fqn)
        if encoding is None:
            return values, values.nbytes
        rows = values.reshape(-1, values.shape[-1]).view(np.uint32)
        stored = encoding.encode(rows)
        decoded = encoding.decode(stored, rows.shape[1])
        repeated = encoding.encode(decoded)
        self.again += any(a.tobytes() != b.tobytes() for a, b in zip(stored, repeated, strict=True))
        return decoded.view(np.float32).reshape(values.shape), sum(s.nbytes for s in stored)


def torchao_state(bits: int, block_size: int) -> Roundtrip:
    """Return moments as torchao's low-bit optimizers hold them. ImportError without torchao."""
    module = importlib.import_module(f"torchao.optim.subclass_{bits}bit")
    zeros = getattr(module, f"OptimState{bits}bit").zeros

    def roundtrip(fqn: str, values: Floats) -> tuple[Floats, int]:
        if values.size < 4096 or values.size % block_size:  # torchao's own rule
            return values, values.nbytes
        tensor = zeros(values.shape, fqn.endswith(MOMENTS[0]), block_size)
        tensor.copy_(torch.from_numpy(values))
        nbytes = tensor.codes.nbytes + tensor.scale.nbytes
        return tensor.dequantize().numpy().reshape(values.shape), nbytes

    return roundtrip


def bitsandbytes_state(block_size: int) -> Roundtrip:
    """Return moments as bitsandbytes' 8-bit optimizers hold them. ImportError without it."""
    functional = importlib.import_module("bitsandbytes.functional")
    codes = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]

    def roundtrip(fqn: str, values: Floats) -> tuple[Floats, int]:
        if values.size < 4096:  # bitsandbytes' own rule
            return values, values.nbytes
        tensor, code = torch.from_numpy(values), codes[fqn.endswith("_sq")]
        stored, state = functional.quantize_blockwise(tensor, code=code, blocksize=block_size)
        decoded = functional.dequantize_blockwise(stored, state).numpy()
        return decoded.reshape(values.shape), stored.nbytes + state.absmax.nbytes

    return roundtrip


def paddle_state(stage: QuantStage) -> Roundtrip:
    """Return moments as PaddleNLP's `ckpt_quant_stage` stores them, in Paddle's orientation."""

    def roundtrip(fqn: str, values: Floats) -> tuple[Floats, int]:
        if stage == "O2" and values.ndim == 1:
            return values, values.nbytes
        transposed = values.ndim == 2 and "embed" not in fqn
        oriented = values.T if transposed else values
        rows = oriented.reshape(len(oriented), -1)
        is_second = fqn.endswith("_sq")

        def read(first: int, count: int) -> Floats:
            return np.ascontiguousarray(rows[first : first + count])

        moment = Moment(fqn, oriented.shape, is_second, read)
        stored = np.concatenate([chunk for _, chunk in dequantized(stage, moment)])
        scales = rows.shape[1] * (1 if stage == "O1" else len(rows) // GROUP_ROWS)
        nbytes = rows.size // (1 if stage == "O1" else 2) + 4 * scales * (2 if is_second else 1)
        stored = stored.reshape(oriented.shape)
        return stored.T if transposed else stored, nbytes

    return roundtrip


# ---- rows


def measure(state: State, roundtrip: Roundtrip) -> Columns:
    """Take all moments there and back; return size and error."""
    nbytes = plain = params = 0
    differences: dict[str, float] = {}
    squares: dict[str, float] = {}
    encoded = []
    for fqn in parameters(state):
        exact = moments_of(state, fqn)
        results = [roundtrip(f"{fqn}/{m}", v) for m, v in zip(MOMENTS, exact, strict=True)]
        stored = sum(size for _, size in results)
        nbytes, params = nbytes + stored, params + exact[0].size
        if stored == sum(values.nbytes for values in exact):
            plain += stored
        else:
            encoded.append(exact)
        updates = update(*exact), update(*(values for values, _ in results))
        differences[fqn] = float(((updates[1] - updates[0]) ** 2).sum())
        squares[fqn] = float((updates[0] ** 2).sum())
    worst = max(squares, key=lambda fqn: differences[fqn] / squares[fqn])
    total = sum(differences.values())
    return {
        "params": params,
        "bytes_per_param": round(2 + nbytes / params, 4),
        "plain_bytes_per_param": round(plain / params, 4),
        "bound_bytes_per_param": round(2 + (plain + bound_bytes(encoded, total)) / params, 3),
        "error": round((total / sum(squares.values())) ** 0.5, 4),
        "worst_error": round((differences[worst] / squares[worst]) ** 0.5, 4),
        "worst": worst,
    }


def measure_form(name: str, state: State, form: str) -> Columns:
    """Return the row of a form of this package."""
    chosen = choose(state, form)
    roundtrip = Encoded(chosen)
    row = measure(state, roundtrip)
    pairs = []
    for moment in MOMENTS:
        named = {fqn: e for fqn, e in chosen.items() if fqn.endswith(f"/{moment}")}
        flat = np.concatenate([state["optimizer", fqn].numpy().reshape(-1) for fqn in named])
        rows = np.resize(flat, TIMED_SHAPE).view(np.uint32)
        encoding = next(iter(named.values()))
        pairs.append((encoding, rows, encoding.encode(rows)))
    nbytes = sum(rows.nbytes for _, rows, _ in pairs)
    return {
        "bench": "compression",
        "state": name,
        "form": form,
        **row,
        "again": roundtrip.again,
        "encode_gb_per_s": gb_per_s(lambda: [e.encode(rows) for e, rows, _ in pairs], nbytes),
        "decode_gb_per_s": gb_per_s(
            lambda: [e.decode(stored, TIMED_SHAPE[1]) for e, _, stored in pairs], nbytes
        ),
    }


def measure_peer(state: State, package: str, form: str, make: Callable[[], Roundtrip]) -> Columns:
    """Return the row of a package that holds optimizer state in fewer bits."""
    row: Columns = {"bench": "compression", "state": REFERENCE, "form": f"{package} {form}"}
    try:
        return row | measure(state, make()) | {"version": importlib.metadata.version(package)}
    except ImportError as error:
        return row | {"error": None, "bytes_per_param": None, "why": f"no {package}: {error}"}


def measure_paddle(state: State, stage: QuantStage) -> Columns:
    row: Columns = {"bench": "compression", "state": REFERENCE, "form": f"PaddleNLP {stage}"}
    return row | measure(state, paddle_state(stage))


def measure_zstd(state: State) -> Columns:
    """Return the row of byte planes, each compressed by zstd level 1."""
    row: Columns = {"bench": "compression", "state": REFERENCE, "form": "byte planes, zstd-1"}
    flat = np.concatenate(
        [v.reshape(-1) for fqn in parameters(state) for v in moments_of(state, fqn)]
    )
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError as error:
        return row | {"error": None, "bytes_per_param": None, "why": f"no zstandard: {error}"}
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode() -> list[bytes]:
        planes = np.ascontiguousarray(flat.view(np.uint8).reshape(-1, 4).T)
        return [compressor.compress(plane) for plane in planes]

    def decode() -> Floats:
        planes = [np.frombuffer(decompressor.decompress(body), np.uint8) for body in stored]
        return np.ascontiguousarray(np.stack(planes, 1)).view(np.float32).reshape(-1)

    stored = encode()
    assert decode().tobytes() == flat.tobytes()
    return row | {
        "version": zstandard.__version__,
        "error": 0.0,
        "bytes_per_param": round(2 + 8 * sum(map(len, stored)) / flat.nbytes, 4),
        "encode_gb_per_s": gb_per_s(encode, flat.nbytes),
        "decode_gb_per_s": gb_per_s(decode, flat.nbytes),
    }


def measure_masters(state: State) -> Columns:
    """Return the row of the parameters as masters beside the rounded parameters."""
    flat = torch.cat([state["master_weights", fqn].reshape(-1) for fqn in parameters(state)])
    rows = flat[: len(flat) // 1024 * 1024].reshape(-1, 1024)
    masters, encoding = rows.numpy().view(np.uint32), MasterEncoding()
    model = rows.bfloat16().view(torch.int16).numpy().view(np.uint16)
    stored = encoding.encode(masters)
    exceptions = encoding.outliers(masters, model)
    decoded = encoding.decode(stored, 1024, model)
    assert np.array_equal(np.flatnonzero(decoded != masters), exceptions)
    return {
        "bench": "compression",
        "state": REFERENCE,
        "form": "masters",
        "params": masters.size,
        "exceptions": len(exceptions),
        "encode_gb_per_s": gb_per_s(
            lambda: (encoding.encode(masters), encoding.outliers(masters, model)), masters.nbytes
        ),
        "decode_gb_per_s": gb_per_s(lambda: encoding.decode(stored, 1024, model), masters.nbytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default="O1,6/5,O2,5/5,5/4,4/4", help="of the reference state")
    parser.add_argument("--states", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="torchao")
    for name in options.states.split(","):
        state = train(name, options.steps)
        is_reference = name == REFERENCE
        for form in options.forms.split(",") if is_reference else ("O1", "O2"):
            write_rows([measure_form(name, state, form)], options.out)
        if is_reference:
            rows = [
                measure_peer(
                    state,
                    "torchao",
                    f"{bits} bits, blocks of {block_size}",
                    partial(torchao_state, bits, block_size),
                )
                for bits, block_size in ((8, 256), (8, 64), (4, 128), (4, 64))
            ]
            rows += [
                measure_peer(
                    state,
                    "bitsandbytes",
                    f"8 bits, blocks of {block_size}",
                    partial(bitsandbytes_state, block_size),
                )
                for block_size in (256, 64)
            ]
            rows += [measure_paddle(state, stage) for stage in get_args(QuantStage)]
            write_rows([measure_masters(state), measure_zstd(state), *rows], options.out)


if __name__ == "__main__":
    main()
