"""Knows which rank reads and writes which bytes of which file; performs no I/O."""
