"""The Source protocol, its torch view, diff and stateful objects."""
