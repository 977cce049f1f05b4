"""Names of torch: dtypes, and what wrappers insert into names of tensors. Needs no torch."""

from __future__ import annotations

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
TORCH_DTYPE_NAMES = {f"torch.{torch_name}": name for name, torch_name in TORCH_NAMES.items()}
# Of torch.compile and of activation checkpointing.
WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
EXTRA_STATE = "_extra_state"


def safetensors_dtype(dtype: object) -> str:
    """Return the name in safetensors of a torch dtype, or of a name; torch's if there is none."""
    return TORCH_DTYPE_NAMES.get(str(dtype), str(dtype))


def is_extra_state(name: str) -> bool:
    """Return whether a state dict key is that of extra state, whose value may be a tensor."""
    return name.rpartition(".")[2] == EXTRA_STATE


def strip_wrappers(name: str) -> str:
    """Return a name without what torch.compile and activation checkpointing insert."""
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name
