"""One checkpoint folder: staging, commit, reading and verification."""
