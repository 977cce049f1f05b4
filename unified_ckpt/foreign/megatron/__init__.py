"""Reads Megatron-LM and Megatron-Core checkpoints; start with `source.py`."""
