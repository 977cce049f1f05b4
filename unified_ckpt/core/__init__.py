"""Decides: shardings, plans, coverage, retention, recipes. Pure: no torch, no disk, no clock."""
