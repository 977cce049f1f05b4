"""Reads Orbax and MaxText checkpoints as Sources, without JAX; start with `source.py`."""
