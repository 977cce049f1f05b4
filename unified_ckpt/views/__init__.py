"""A Source in, a Source out: rename, split, concatenate, stack, cast, select. Writes nothing."""
