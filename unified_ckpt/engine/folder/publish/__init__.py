"""The publishers of a staged checkpoint: by renames in a file system, by a record in a bucket."""
