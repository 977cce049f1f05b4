"""Fill live state from a Source: match, check, plan, read, verify, install. Knows no format."""
