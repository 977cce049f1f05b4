"""Touches files and folders: reads, writes, durable renames, locks."""
