"""Many checkpoints over the life of a run: when to save, what to keep, where to resume.

Knows steps, rules, signals and tiers; never touches the bytes of a checkpoint itself.
"""
