"""The steps under one root: scan, rotate and remove them. Knows no tiers and no other nodes."""
