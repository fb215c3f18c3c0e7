"""EqualitySaturation: the graph search as a TVM pass."""

from __future__ import annotations

import logging

from tvm import ir, transform

from .graph_search import GraphConfig, optimize_graph

__all__ = ["EqualitySaturation"]

LOGGER = logging.getLogger("eqtune")


@transform.module_pass(opt_level=0, name="EqualitySaturation")
class EqualitySaturation:
    """Replace the graph of "main" by an equal one that is cheaper, where there is one.

    See `eqtune.optimize_graph` for what it does and what it leaves alone. Wants weights as constants: run
    `FoldBatchNorm` and `FoldWeights` before it.

    Parameters
    ----------
    config : GraphConfig, optional
        Rules, limits, extractors, whether outputs are compared.
    """

    def __init__(self, config: GraphConfig | None = None) -> None:
        self.config = config or GraphConfig()

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Search; the module itself when nothing is gained."""
        result = optimize_graph(mod, self.config)
        LOGGER.info(
            "EqualitySaturation: %d e-nodes, %s, estimated %.1f -> %.1f us%s",
            result.e_nodes,
            result.stop_reason or "not searched",
            result.cost_before_s * 1e6,
            result.cost_after_s * 1e6,
            f"; kept: {result.kept_because}" if result.kept_because else "",
        )
        return result.mod
