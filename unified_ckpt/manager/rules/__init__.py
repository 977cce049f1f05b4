"""Pure rules: when to save, what a failure means, which metrics count. No files, no ranks."""
