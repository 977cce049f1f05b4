"""One HTML page about a run or a checkpoint."""
