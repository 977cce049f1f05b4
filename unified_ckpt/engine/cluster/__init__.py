"""One save in the folders of several nodes, as one Source. Knows no live state."""
