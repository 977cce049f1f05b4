"""Touches files and folders: reads, writes, renames, locks.

Knows no ranks, and not what the files mean.
"""
