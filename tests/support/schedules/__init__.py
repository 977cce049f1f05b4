"""Runs ranks as threads, one at a time, in an order that a seed draws, on a virtual clock."""
