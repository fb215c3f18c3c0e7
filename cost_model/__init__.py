"""PLACEHOLDER cost_model"""

if __name__ != "eqtune.cost_model":
    raise ImportError(f"import this package as 'eqtune.cost_model', not as {__name__!r}: a second copy of its classes would break isinstance")
