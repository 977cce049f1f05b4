"""DeepSpeed's checkpoints as a Source. Begin with `source.py`."""
