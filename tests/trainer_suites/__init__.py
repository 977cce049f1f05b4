"""Runs a trainer's own tests with our drop-in added to every trainer. Contains no test."""
