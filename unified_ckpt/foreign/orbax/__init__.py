"""Reads and writes Orbax and MaxText checkpoints, without JAX; start with `source.py`."""
