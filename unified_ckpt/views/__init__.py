"""Sources seen otherwise: renamed, cut up and joined, stacked, cast. No byte moves before it is
read.
"""
