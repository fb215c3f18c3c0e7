"""PLACEHOLDER search"""

if __name__ != "eqtune.search":
    raise ImportError(f"import this package as 'eqtune.search', not as {__name__!r}: a second copy of its classes would break isinstance")
