"""Reads pickles of other frameworks without executing them."""
