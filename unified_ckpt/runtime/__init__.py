"""Acts, one kind of effect per folder: ranks, files, bytes between ranks, live torch state."""
