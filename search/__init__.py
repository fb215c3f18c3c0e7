"""The searches: over equal graphs (`graph`), and over schedules of one kernel.

A schedule search is put together from three parts that know each other only by small protocols: a space of decision
vectors (`space`), a strategy that asks for points and is told latencies (`strategies`), and an allocator that decides
which kernel is measured next (`allocation`). All three can run, and be tested, without a compiler.
"""

if __name__ != "eqtune.search":
    raise ImportError(
        f"import this package as 'eqtune.search', not as {__name__!r}: "
        "a second copy of its classes would break isinstance"
    )
