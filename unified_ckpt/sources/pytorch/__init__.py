"""Reads files that PyTorch writes: `torch.save`, DCP folders, Lightning's. Knows no model names."""
