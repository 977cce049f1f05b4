"""Writes a Source in any format that can be written. Knows no live state."""
