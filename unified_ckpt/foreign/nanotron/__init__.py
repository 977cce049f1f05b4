"""Reads nanotron checkpoints; start with `source.py`."""
