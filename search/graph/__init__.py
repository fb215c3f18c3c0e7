"""The search over equal graphs, by equality saturation.

A Relax dataflow block is encoded as terms (`encode`), the terms as an e-graph (`egraph`), which rules (`rules`) grow
round by round within limits (`saturate`); the cheapest graph is extracted from it (`extract`) by the prices of `cost`,
and written back (`decode`). `superoptimize` does all of it but encoding and decoding; it knows nothing of TVM.

How to write a rule: `rules/rule.py`. How rules are verified: `verify`. Random graphs for tests: `toy`.
"""
