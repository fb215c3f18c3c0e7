"""search/strategies."""
