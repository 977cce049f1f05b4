"""Writing what was read: anew as ours, or in a format of others."""
