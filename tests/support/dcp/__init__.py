"""State dicts of torch.distributed.checkpoint, and ranks that save them."""
