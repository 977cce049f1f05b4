"""Reads and writes files of `torch.save`."""
