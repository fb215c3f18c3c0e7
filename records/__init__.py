"""PLACEHOLDER records"""

if __name__ != "eqtune.records":
    raise ImportError(f"import this package as 'eqtune.records', not as {__name__!r}: a second copy of its classes would break isinstance")
