"""One checkpoint folder: staging, commit, reading and verification. Knows no live state."""
