"""Knows what nodes hold, copy and write when they share no folder; knows no network."""
