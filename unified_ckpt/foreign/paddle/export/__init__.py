"""Writes what Paddle's trainers read: plan, tensors, files."""
