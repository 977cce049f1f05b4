"""Selects what a run resumes from. Reads folders of one rank; changes nothing."""
