"""search/graph/rules."""
