"""Reads and writes the formats of other frameworks: one folder for each."""
