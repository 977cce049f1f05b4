"""Reads nanotron checkpoints as a Source; start with `source.py`."""
