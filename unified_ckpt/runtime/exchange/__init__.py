"""Moves bytes between ranks: shared memory on a node, TCP between nodes.

Knows neither names of tensors nor layouts of files.
"""
