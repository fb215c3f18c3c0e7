"""search/space."""
