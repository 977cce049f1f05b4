"""Adapters for trainers. Each maps a trainer's own calls to saves and loads; none adds rules."""
