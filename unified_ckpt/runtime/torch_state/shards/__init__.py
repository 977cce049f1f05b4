"""Tensors whose holders say themselves which boxes of a larger one they have."""
