"""Declared boxes of all ranks: proved to be whole tensors, and divided among their holders."""
