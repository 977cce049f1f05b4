"""Presents a Source as another one: renamed, split, stacked, cast."""
