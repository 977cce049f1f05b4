"""Orbax's and MaxText's checkpoints as a Source. Begin with `source.py`."""
