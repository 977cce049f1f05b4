"""Encodes tensors while a save writes them, and collects what encodings cannot hold."""
