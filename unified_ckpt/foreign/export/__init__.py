"""Writes a Source in any format that can be written; start with `convert.py`."""
