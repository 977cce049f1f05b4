"""Reads and writes PaddleNLP checkpoints, without paddle; start with `source.py`."""
