"""Names of torch: dtypes, and what wrappers insert into names of tensors. Needs no torch."""

from __future__ import annotations

from unified_ckpt.core.sharding.dtypes import TORCH_NAMES

TORCH_DTYPE_NAMES = {f"torch.{torch_name}": name for name, torch_name in TORCH_NAMES.items()}
FSDP1_WRAPPER, FLAT_PARAMETER = "_fsdp_wrapped_module.", "_flat_param"
# Of torch.compile, of activation checkpointing, and of FSDP1.
WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.", FSDP1_WRAPPER)
EXTRA_STATE = "_extra_state"


def safetensors_dtype(dtype: object) -> str:
    """Return the name in safetensors of a torch dtype, or of a name; torch's if there is none."""
    return TORCH_DTYPE_NAMES.get(str(dtype), str(dtype))


def is_extra_state(name: str) -> bool:
    """Return whether a state dict key is that of extra state, whose value may be a tensor."""
    return name.rpartition(".")[2] == EXTRA_STATE


def strip_wrappers(name: str) -> str:
    """Return a name without what torch.compile, activation checkpointing and FSDP1 insert."""
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name
