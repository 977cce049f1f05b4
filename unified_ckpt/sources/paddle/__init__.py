"""Reads PaddleNLP checkpoints as Sources, without paddle; start with `source.py`."""
