"""Reads Megatron-LM and Megatron-Core checkpoints as a Source; start with `source.py`."""
