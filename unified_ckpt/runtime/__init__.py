"""All effects, one kind per folder: ranks, files, bytes between ranks, live torch state."""
