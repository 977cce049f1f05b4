"""The files that identify a folder of torch.distributed.checkpoint."""

DCP_METADATA = ".metadata"
LIGHTNING_META = "meta.pt"  # the remaining state of Lightning's sharded checkpoints
