"""Reads pickles of other frameworks without executing them; knows none of their formats."""
