"""Knows the bytes and the JSON of a checkpoint folder; opens no file."""
