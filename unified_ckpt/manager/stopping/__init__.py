"""Stops all ranks at one step, and waits before a process ends. Knows nothing of checkpoints."""
