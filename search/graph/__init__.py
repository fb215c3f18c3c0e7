"""search/graph."""
