"""Knows which rank holds which boxes of a tensor; knows no files and no torch."""
