"""The files that identify a nanotron checkpoint."""

NANOTRON_LATEST, NANOTRON_META = "latest.txt", "checkpoint_metadata.json"  # of a root, of a step
