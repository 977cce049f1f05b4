"""Object stores: keys and bytes, and a bucket's prefix as a root."""
