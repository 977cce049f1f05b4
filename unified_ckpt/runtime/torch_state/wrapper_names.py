"""What torch's wrappers put into the names of tensors. Imports without torch."""

from __future__ import annotations

# Of torch.compile and of activation checkpointing.
WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
EXTRA_STATE = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Return whether a state dict key is that of extra state, whose value may be a tensor."""
    return name.rpartition(".")[2] == EXTRA_STATE


def strip_wrappers(name: str) -> str:
    """Return a name without what torch.compile and activation checkpointing insert."""
    for wrapper in WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name
