"""Power cuts: records what an operation does to a disk, and draws what a cut leaves of it."""
