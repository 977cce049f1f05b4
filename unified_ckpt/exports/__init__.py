"""A Source into another format, and `convert`. Knows nothing of live state."""
