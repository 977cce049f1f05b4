"""A damaged folder made whole in place, from copies of the same save. Creates no new checkpoint."""
