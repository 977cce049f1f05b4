"""Detects which framework wrote a path, from file names; does not read tensors or import torch."""
