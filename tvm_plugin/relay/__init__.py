"""Relay programs: read them, optimise them, run passes the Relay way."""
