"""Pure rules: when to save, what to replace, what a failure means, which metrics count."""
