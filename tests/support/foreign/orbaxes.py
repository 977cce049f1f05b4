"""Writes checkpoints with Orbax itself. MaxText's trees are built from Hugging Face weights, head
by head. No code is shared with the reader.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.processes import warm
from tests.support.processes.launch import PROGRAMS, environment

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
    """Write in other processes, so that JAX is not imported here."""
    scratch.write_bytes(pickle.dumps(list(jobs)))
    command = [*warm.orbax(PROGRAMS / "orbax_writer.py", environment()), str(scratch)]
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
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()


def train_state(weights: Any, first: Any, second: Any, *, step: int = 7) -> Any:
    """A tree with the shape of MaxText's Linen train state."""
    count = np.int32(step)
    return {
        "params": {"params": weights},
        "step": count,
        "opt_state": [{"adam": (count, {"params": first}, {"params": second})}, None, None],
    }


class MaxText:
    """Hugging Face's tensors, or their moments, in MaxText's form. `power`: 0 for weights, 1 and 2
    for the moments.

    A weight that MaxText multiplies by s has gradients scaled by 1/s. A weight it adds a constant
    to has the same gradients.
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
        weights = {name: self.state[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"}
        query = self.rotated(self.split(weights["q"], self.heads))
        if self.kind in ("llama", "mistral", "mixtral", "gemma", "gemma2"):
            query = self.scaled(
                query,
                1
                / np.sqrt(
                    self.config.query_pre_attn_scalar if self.kind == "gemma2" else self.head
                ),
            )
        out = np.stack(
            [
                weights["o"][:, head * self.head : (head + 1) * self.head].T
                for head in range(self.heads)
            ]
        )  # [H, D, E]
        tree = {
            "query": {"kernel": query},
            "key": {"kernel": self.rotated(self.split(weights["k"], self.kv_heads))},
            "value": {"kernel": self.split(weights["v"], self.kv_heads)},
            "out": {"kernel": out},
        }
        if self.kind == "qwen2":
            for name, heads in (
                ("query", self.heads),
                ("key", self.kv_heads),
                ("value", self.kv_heads),
            ):
                tree[name]["bias"] = self.state[f"{layer}.self_attn.{name[0]}_proj.bias"].reshape(
                    heads, self.head
                )
        if self.kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            for name in ("query", "key"):
                tree[f"{name}_norm"] = {
                    "scale": self.norm(f"{layer}.self_attn.{name[0]}_norm.weight")
                }
        return tree

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
            tree = {"gate": {"kernel": self.state[f"{layer}.{inner}.gate.weight"].T}}
            for maxtext_name, hub_name in zip(("wi_0", "wi_1", "wo"), names, strict=True):
                tree[maxtext_name] = np.stack(
                    [
                        self.state[f"{layer}.{inner}.experts.{i}.{hub_name}.weight"].T
                        for i in range(count)
                    ]
                )
            return {block: tree}
        names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
        return {
            "mlp": {
                maxtext_name: {"kernel": self.state[f"{layer}.mlp.{hub_name}.weight"].T}
                for maxtext_name, hub_name in names.items()
            }
        }

    def layer(self, number: int) -> dict[str, Any]:
        prefix = f"model.layers.{number}"
        before, after = (
            self.norm(f"{prefix}.input_layernorm.weight"),
            self.norm(f"{prefix}.post_attention_layernorm.weight"),
        )
        tree = {"self_attention": self.attention(prefix), **self.feed_forward(prefix)}
        if self.kind == "gemma":
            return {
                **tree,
                "pre_self_attention_norm": {"scale": before},
                "pre_ffw_norm": {"scale": after},
            }
        if "gemma" not in self.kind:
            return {
                **tree,
                "pre_self_attention_layer_norm": {"scale": before},
                "post_self_attention_layer_norm": {"scale": after},
            }
        inner, last = (
            self.norm(f"{prefix}.{name}_feedforward_layernorm.weight") for name in ("pre", "post")
        )
        norms = {
            "pre_self_attention_norm": before,
            "post_self_attention_norm": after,
            "pre_ffw_norm": inner,
            "post_ffw_norm": last,
        }
        return {**tree, **{name: {"scale": scale} for name, scale in norms.items()}}

    def decoder(self, *, stacked: bool) -> dict[str, Any]:
        count = self.config.num_hidden_layers
        layers = [self.layer(number) for number in range(count)]
        if self.kind == "gemma2":
            pairs = zip(layers[::2], layers[1::2], strict=True)
            layers = [
                {
                    f"{name}_{which}": tree
                    for which, layer in (("local", local), ("global", other))
                    for name, tree in layer.items()
                }
                for local, other in pairs
            ]
        if self.kind == "gemma3_text" and stacked:
            whole = count - count % 6
            full_groups = {"layers": {f"layers_{i}": stack(layers[i:whole:6]) for i in range(6)}}
            return {
                **full_groups,
                "layers_remainder": {
                    f"layers_{i}": layers[whole + i] for i in range(count - whole)
                },
            }
        return (
            {"layers": stack(layers)}
            if stacked
            else {f"layers_{i}": layer for i, layer in enumerate(layers)}
        )

    def tree(self, *, stacked: bool, vocab: int) -> dict[str, Any]:
        """`vocab`: rows of the embedding; rows beyond the model's are zeros."""
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
    """Stack on axis 1, as `nn.scan` does with MaxText's param_scan_axis."""
    if isinstance(layers[0], dict):
        return {name: stack([layer[name] for layer in layers]) for name in layers[0]}
    return np.stack(layers, axis=1)


def leaves(tree: Any, *, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        name: leaf
        for key, subtree in tree.items()
        for name, leaf in leaves(subtree, prefix=f"{prefix}.{key}" if prefix else key).items()
    }


def mapped(state: Arrays, change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(array) for name, array in state.items()}
