"""Megatron-LM's and Megatron-Core's checkpoints as a Source. Begin with `source.py`."""
