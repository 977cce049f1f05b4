"""What the verbs print: sizes, names, tables and trees, progress, and the screen they fit."""
