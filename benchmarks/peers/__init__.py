"""What people use instead, configured as they would."""
