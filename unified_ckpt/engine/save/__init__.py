"""Saves live state into a checkpoint folder. Knows nothing of reading or of other formats."""
