"""Side-by-side measurements; each module is a command that prints a table and writes JSON."""
