"""Turns live torch objects into named tensors with shardings, and loads them back.

Knows modules, optimizers, samplers and generators; touches no files.
"""
