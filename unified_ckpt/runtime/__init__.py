"""Acts, one kind of effect per file: ranks, files, transport of bytes, live torch state.

Knows nothing of checkpoints, their folders or formats.
"""
