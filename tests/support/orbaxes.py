"""Checkpoints of Orbax for tests: trees as MaxText has them, made from Hugging Face's weights head
by head, and written by Orbax itself.

Shares no line with what reads them.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.processes.launch import HERE, environment

Arrays = Mapping[str, Any]


def job(
    path: Path,
    tree: Any,
    *,
    api: str = "manager",
    ocdbt: bool = True,
    zarr3: bool = True,
    **more: Any,
) -> dict[str, Any]:
    return {
        "path": str(path),
        "tree": tree,
        "api": api,
        "ocdbt": ocdbt,
        "zarr3": zarr3,
        "steps": [7],
        **more,
    }


def write(jobs: Sequence[Mapping[str, Any]], scratch: Path, *, processes: int = 1) -> None:
    """In other processes: JAX is none of ours."""
    scratch.write_bytes(pickle.dumps(list(jobs)))
    command = [sys.executable, str(HERE / "orbax_writer.py"), str(scratch)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    places = [
        [str(number), str(processes), str(port)] if processes > 1 else []
        for number in range(processes)
    ]
    running = [
        subprocess.Popen(
            [*command, *place],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        for place in places
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes, "\n".join(outputs)


def as_numpy(tensor: torch.Tensor) -> Any:
    import ml_dtypes

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def train_state(weights: Any, first: Any, second: Any, *, step: int = 7) -> Any:
    """As MaxText's: Linen's shape of a train state."""
    count = np.int32(step)
    return {
        "params": {"params": weights},
        "step": count,
        "opt_state": [{"adam": (count, {"params": first}, {"params": second})}, None, None],
    }


class MaxText:
    """Hugging Face's tensors, or moments of them, in MaxText's form. `power`: 0 of weights, 1 and 2
    of the moments.

    A weight that MaxText multiplies by s has gradients of 1/s; one that it adds to, the same.
    """

    def __init__(self, config: Any, state: Arrays, *, power: int = 0) -> None:
        self.config, self.state, self.power = config, state, power
        self.kind = config.model_type
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    def scaled(self, array: Any, factor: float) -> Any:
        factor = factor if self.power == 0 else factor**-self.power
        return (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)

    def norm(self, name: str) -> Any:
        array = self.state[name]
        return (
            (array + 1).astype(array.dtype) if "gemma" in self.kind and self.power == 0 else array
        )

    def split(self, array: Any, heads: int) -> Any:
        """[heads * D, E] -> [E, heads, D]"""
        return np.stack(
            [array[head * self.head : (head + 1) * self.head].T for head in range(heads)], axis=1
        )

    def rotated(self, array: Any) -> Any:
        if self.kind != "llama" or self.config.rope_parameters["rope_type"] != "llama3":
            return array
        half = self.head // 2
        return array[..., [half * (i % 2) + i // 2 for i in range(self.head)]]

    def attention(self, layer: str) -> dict[str, Any]:
        of = {name: self.state[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"}
        query = self.rotated(self.split(of["q"], self.heads))
        if self.kind in ("llama", "mistral", "mixtral", "gemma", "gemma2"):
            query = self.scaled(
                query,
                1
                / np.sqrt(
                    self.config.query_pre_attn_scalar if self.kind == "gemma2" else self.head
                ),
            )
        out = np.stack(
            [of["o"][:, head * self.head : (head + 1) * self.head].T for head in range(self.heads)]
        )  # [H, D, E]
        found = {
            "query": {"kernel": query},
            "key": {"kernel": self.rotated(self.split(of["k"], self.kv_heads))},
            "value": {"kernel": self.split(of["v"], self.kv_heads)},
            "out": {"kernel": out},
        }
        if self.kind == "qwen2":
            for name, heads in (
                ("query", self.heads),
                ("key", self.kv_heads),
                ("value", self.kv_heads),
            ):
                found[name]["bias"] = self.state[f"{layer}.self_attn.{name[0]}_proj.bias"].reshape(
                    heads, self.head
                )
        if self.kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            for name in ("query", "key"):
                found[f"{name}_norm"] = {
                    "scale": self.norm(f"{layer}.self_attn.{name[0]}_norm.weight")
                }
        return found

    def feed_forward(self, layer: str) -> dict[str, Any]:
        if self.kind in ("mixtral", "qwen3_moe"):
            block, inner = (
                ("MoeBlock_0", "block_sparse_moe")
                if self.kind == "mixtral"
                else ("moe_block", "mlp")
            )
            names = (
                ("w1", "w3", "w2")
                if self.kind == "mixtral"
                else ("gate_proj", "up_proj", "down_proj")
            )
            count = getattr(self.config, "num_local_experts", None) or self.config.num_experts
            found = {"gate": {"kernel": self.state[f"{layer}.{inner}.gate.weight"].T}}
            for theirs, ours in zip(("wi_0", "wi_1", "wo"), names, strict=True):
                found[theirs] = np.stack(
                    [
                        self.state[f"{layer}.{inner}.experts.{i}.{ours}.weight"].T
                        for i in range(count)
                    ]
                )
            return {block: found}
        names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
        return {
            "mlp": {
                theirs: {"kernel": self.state[f"{layer}.mlp.{ours}.weight"].T}
                for theirs, ours in names.items()
            }
        }

    def layer(self, number: int) -> dict[str, Any]:
        at = f"model.layers.{number}"
        before, after = (
            self.norm(f"{at}.input_layernorm.weight"),
            self.norm(f"{at}.post_attention_layernorm.weight"),
        )
        found = {"self_attention": self.attention(at), **self.feed_forward(at)}
        if self.kind == "gemma":
            return {
                **found,
                "pre_self_attention_norm": {"scale": before},
                "pre_ffw_norm": {"scale": after},
            }
        if "gemma" not in self.kind:
            return {
                **found,
                "pre_self_attention_layer_norm": {"scale": before},
                "post_self_attention_layer_norm": {"scale": after},
            }
        inner, last = (
            self.norm(f"{at}.{name}_feedforward_layernorm.weight") for name in ("pre", "post")
        )
        norms = {
            "pre_self_attention_norm": before,
            "post_self_attention_norm": after,
            "pre_ffw_norm": inner,
            "post_ffw_norm": last,
        }
        return {**found, **{name: {"scale": scale} for name, scale in norms.items()}}

    def decoder(self, *, stacked: bool) -> dict[str, Any]:
        count = self.config.num_hidden_layers
        layers = [self.layer(number) for number in range(count)]
        if self.kind == "gemma2":
            pairs = zip(layers[::2], layers[1::2], strict=True)
            layers = [
                {
                    f"{name}_{which}": tree
                    for which, one in (("local", local), ("global", other))
                    for name, tree in one.items()
                }
                for local, other in pairs
            ]
        if self.kind == "gemma3_text" and stacked:
            whole = count - count % 6
            found = {"layers": {f"layers_{i}": stack(layers[i:whole:6]) for i in range(6)}}
            return {
                **found,
                "layers_remainder": {
                    f"layers_{i}": layers[whole + i] for i in range(count - whole)
                },
            }
        return (
            {"layers": stack(layers)}
            if stacked
            else {f"layers_{i}": one for i, one in enumerate(layers)}
        )

    def tree(self, *, stacked: bool, vocab: int) -> dict[str, Any]:
        """`vocab`: rows of the embedding, those beyond the model's are zeros."""
        scale = np.sqrt(self.config.hidden_size) if "gemma" in self.kind else 1.0
        embedding = (
            self.scaled(self.state["model.embed_tokens.weight"], scale)
            if scale != 1.0
            else self.state["model.embed_tokens.weight"]
        )
        rows = np.zeros((vocab - embedding.shape[0], embedding.shape[1]), embedding.dtype)
        decoder = {
            **self.decoder(stacked=stacked),
            "decoder_norm": {"scale": self.norm("model.norm.weight")},
        }
        if not self.config.tie_word_embeddings:
            decoder["logits_dense"] = {
                "kernel": np.concatenate([self.state["lm_head.weight"], rows]).T
            }
        return {
            "token_embedder": {"embedding": np.concatenate([embedding, rows])},
            "decoder": decoder,
        }


def stack(layers: Sequence[Any]) -> Any:
    """On axis 1, as `nn.scan` does with MaxText's param_scan_axis."""
    if isinstance(layers[0], dict):
        return {name: stack([one[name] for one in layers]) for name in layers[0]}
    return np.stack(layers, axis=1)


def leaves(tree: Any, *, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        name: leaf
        for key, one in tree.items()
        for name, leaf in leaves(one, prefix=f"{prefix}.{key}" if prefix else key).items()
    }


def mapped(state: Arrays, change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(array) for name, array in state.items()}
