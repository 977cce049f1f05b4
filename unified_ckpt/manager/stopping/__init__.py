"""Stops all ranks at one step, and waits before a process ends."""
