"""Reads DeepSpeed checkpoints; start with `source.py`."""
