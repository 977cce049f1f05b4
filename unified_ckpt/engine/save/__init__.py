"""Saves live state into a checkpoint folder."""
