"""What happened in a run: events in a file of its root, and the hooks of the caller."""
