"""Adapters for trainers and loggers. Each maps another library's calls; none adds rules."""
