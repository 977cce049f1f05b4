"""Repairs a damaged folder in place, from copies of the same save. Creates no new checkpoint."""
