"""Measure the size and the error of encoded optimizer state, of a small model that is trained here.

Run: python benchmarks/bench_compression.py [--bits 8/8,6/4] [--steps 400] [--out FILE].

The model is a Llama of 0.8 M parameters. AdamW trains it on the source of Python's library.
One JSON line for each pair of bits of the first and the second moment:

- `bytes_per_param`: of the model in bfloat16 and both moments, with scales;
- `error`: of the update u = m / (sqrt(v) + eps), |u' - u| / |u|, L2 over all parameters;
  `worst_error`: of the tensor where it is largest;
- `again`: tensors whose bytes differ when what was decoded is encoded again. Expected: 0;
- `encode_gb_per_s`, `decode_gb_per_s`: float32 bytes of the moments per CPU second.

A further line has the same for master weights beside the model; `exceptions` counts masters that
the encoding does not hold.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from common import write_rows
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from unified_ckpt.format import encodings

EPSILON = 1e-8  # of AdamW
CONTEXT = 128
ROWS_PER_CALL = 64  # keeps what one call touches in the cache

Moments = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def train(steps: int) -> tuple[LlamaForCausalLM, Moments]:
    """Train, and return the model and the moments of each parameter as rows."""
    torch.manual_seed(0)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    corpus = torch.frombuffer(
        bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=EPSILON)
    for _ in range(steps):
        starts = torch.randint(0, len(corpus) - CONTEXT, (16,))
        batch = torch.stack([corpus[start : start + CONTEXT] for start in starts]).long()
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    moments = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        first, second = (
            state[key].numpy().reshape(-1, parameter.shape[-1]) for key in ("exp_avg", "exp_avg_sq")
        )
        moments[name] = first, second
    return model, moments


def timed(call: Callable[[], object], *, nbytes: int) -> float:
    """Time a call several times; return the best rate, in GB per CPU second."""
    seconds = []
    for _ in range(5):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return round(nbytes / min(seconds) / 1e9, 2)


def update(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the direction of a step of Adam."""
    return first / (np.sqrt(second.astype(np.float64)) + EPSILON)


def measure_moments(moments: Moments, bits: Sequence[int]) -> dict[str, object]:
    """Encode and decode all moments, and return a row."""
    pair = encodings.first_moment(bits[0]), encodings.second_moment(bits[1])
    nbytes = params = again = 0
    squares: list[tuple[float, float]] = []
    for arrays in moments.values():
        decoded = []
        for encoding, rows in zip(pair, arrays, strict=True):
            encoded = encoding.encode(rows)
            decoded.append(encoding.decode(encoded, rows.shape[1]))
            repeated = encoding.encode(decoded[-1])
            again += repeated.codes.tobytes() != encoded.codes.tobytes()
            again += repeated.scales.tobytes() != encoded.scales.tobytes()
            nbytes += encoded.codes.nbytes + encoded.scales.nbytes
        exact = update(*arrays)
        params += exact.size
        squares.append((float(((update(*decoded) - exact) ** 2).sum()), float((exact**2).sum())))
    rows = [np.concatenate([a[i].reshape(-1) for a in moments.values()]) for i in (0, 1)]
    blocks = [r[: len(r) // 1024 * 1024].reshape(-1, 1024)[:ROWS_PER_CALL] for r in rows]
    encoded_blocks = [encoding.encode(b) for encoding, b in zip(pair, blocks, strict=True)]
    timing_nbytes = sum(b.nbytes for b in blocks)
    return {
        "bench": "compression",
        "bits": "/".join(str(number) for number in bits),
        "bytes_per_param": round(2 + nbytes / params, 4),
        "error": round((sum(d for d, _ in squares) / sum(e for _, e in squares)) ** 0.5, 4),
        "worst_error": round(max(d / e for d, e in squares) ** 0.5, 4),
        "again": again,
        "encode_gb_per_s": timed(
            lambda: [e.encode(b) for e, b in zip(pair, blocks, strict=True)], nbytes=timing_nbytes
        ),
        "decode_gb_per_s": timed(
            lambda: [e.decode(b, 1024) for e, b in zip(pair, encoded_blocks, strict=True)],
            nbytes=timing_nbytes,
        ),
    }


def measure_masters(model: LlamaForCausalLM) -> dict[str, object]:
    """Encode and decode the parameters as masters of the rounded parameters, and return a row."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    masters = flat.view(torch.int32).numpy().view(np.uint32)
    rounded = flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    encoded, exceptions = encodings.encode_masters(masters, rounded)
    decoded = encodings.decode_masters(encoded, rounded)
    assert np.array_equal(np.flatnonzero(decoded != masters), exceptions)
    return {
        "bench": "compression",
        "bits": "masters",
        "exceptions": len(exceptions),
        "params": len(masters),
        "encode_gb_per_s": timed(
            lambda: encodings.encode_masters(masters, rounded), nbytes=masters.nbytes
        ),
        "decode_gb_per_s": timed(
            lambda: encodings.decode_masters(encoded, rounded), nbytes=masters.nbytes
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", default="8/8,6/5,6/4,5/5,5/4,4/4")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, moments = train(arguments.steps)
    for pair in arguments.bits.split(","):
        row = measure_moments(moments, [int(number) for number in pair.split("/")])
        write_rows([row], arguments.out)
    write_rows([measure_masters(model)], arguments.out)


if __name__ == "__main__":
    main()
