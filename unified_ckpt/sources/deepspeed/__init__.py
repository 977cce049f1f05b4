"""Reads DeepSpeed checkpoints as a Source; start with `source.py`."""
