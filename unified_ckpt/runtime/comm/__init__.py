"""Coordinates ranks over a key-value store: collectives, errors for all, nodes."""
