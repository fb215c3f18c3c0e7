"""search/allocation."""
