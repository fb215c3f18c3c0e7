"""eqtune."""
