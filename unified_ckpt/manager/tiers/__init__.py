"""A local directory in front of the root: uploads, merges, and whose checkpoints are whose."""
