"""Zoo models as Relax, in the forms that TVM's importers give."""

# ruff: noqa: D102 - documented in builder.Backend

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax import op

from .builder import Array, InputSpec, Pair, Tensor

__all__ = ["RelaxBackend"]


class RelaxBackend:
    """Collects the bindings of one dataflow block; `finish` makes the module. Weights are constants."""

    def __init__(self) -> None:
        self._block_builder = relax.BlockBuilder()
        self._params: list[relax.Var] = []
        self._bindings: list[relax.VarBinding] = []

    def finish(self, outputs: Sequence[Tensor[relax.Expr]]) -> tvm.IRModule:
        """Return an IRModule whose one function, "main", returns the output, or a tuple of several."""
        values = [output.handle for output in outputs]
        value = values[0] if len(values) == 1 else relax.Tuple(values)
        value = self._block_builder.normalize(value)
        result = relax.Var("gv", value.ty)
        block = relax.DataflowBlock([*self._bindings, relax.VarBinding(result, value)])
        body = self._block_builder.normalize(relax.SeqExpr([block], result))
        main = relax.Function(self._params, body, ret_ty=result.ty)
        main = main.with_attr("global_symbol", "main").with_attr("num_input", len(self._params))
        return tvm.IRModule({"main": main})

    def _emit(self, expr: relax.Expr) -> relax.Var:
        expr = self._block_builder.normalize(expr)
        var = relax.DataflowVar(f"lv{len(self._bindings)}", expr.ty)
        self._bindings.append(relax.VarBinding(var, expr))
        return var

    def input(self, spec: InputSpec) -> relax.Var:
        var = relax.Var(spec.name, relax.TensorType(spec.shape, spec.dtype))
        self._params.append(var)
        return var

    def weight(self, name: str, value: Array) -> relax.Expr:
        # relax.const copies, and takes 1.5 s for 400 MB; this shares the array.
        return tvm.ir.GenericConst(tvm.runtime.from_dlpack(value), relax.TensorType(value.shape, str(value.dtype)))

    def conv2d(
        self,
        x: relax.Expr,
        weight: relax.Expr,
        bias: relax.Expr | None,
        stride: int,
        padding: Pair,
        groups: int,
    ) -> relax.Var:
        out = self._emit(op.nn.conv2d(x, weight, strides=stride, padding=padding, groups=groups, out_dtype="float32"))
        if bias is None:
            return out
        return self._emit(op.add(out, self._emit(op.reshape(bias, (1, -1, 1, 1)))))

    def batch_norm(
        self,
        x: relax.Expr,
        gamma: relax.Expr,
        beta: relax.Expr,
        mean: relax.Expr,
        variance: relax.Expr,
        epsilon: float,
    ) -> relax.Var:
        normed = self._emit(op.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, epsilon=epsilon, training=False))
        return self._emit(relax.TupleGetItem(normed, 0))

    def layer_norm(self, x: relax.Expr, gamma: relax.Expr, beta: relax.Expr, width: int, epsilon: float) -> relax.Var:
        return self._emit(op.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=epsilon))

    def max_pool(self, x: relax.Expr, kernel: int, stride: int, padding: int) -> relax.Var:
        return self._emit(op.nn.max_pool2d(x, (kernel, kernel), strides=stride, padding=padding))

    def avg_pool(self, x: relax.Expr, kernel: int, stride: int, padding: int) -> relax.Var:
        return self._emit(
            op.nn.avg_pool2d(x, (kernel, kernel), strides=stride, padding=padding, count_include_pad=True)
        )

    def global_avg_pool(self, x: relax.Expr) -> relax.Var:
        return self._emit(op.nn.adaptive_avg_pool2d(x, (1, 1)))

    def linear(self, x: relax.Expr, weight: relax.Expr, bias: relax.Expr, rank: int) -> relax.Var:
        transposed = self._emit(op.permute_dims(weight))
        return self._emit(op.add(self._emit(op.matmul(x, transposed, out_dtype="float32")), bias))

    def embedding(self, ids: relax.Expr, table: relax.Expr) -> relax.Var:
        return self._emit(op.take(table, ids, axis=0))

    def matmul(self, a: relax.Expr, b: relax.Expr) -> relax.Var:
        return self._emit(op.matmul(a, b, out_dtype="float32"))

    def add(self, a: relax.Expr, b: relax.Expr) -> relax.Var:
        return self._emit(op.add(a, b))

    def mul(self, a: relax.Expr, b: relax.Expr) -> relax.Var:
        return self._emit(op.multiply(a, b))

    def relu(self, x: relax.Expr) -> relax.Var:
        return self._emit(op.nn.relu(x))

    def relu6(self, x: relax.Expr) -> relax.Var:
        return self._emit(op.clip(x, 0.0, 6.0))

    def sigmoid(self, x: relax.Expr) -> relax.Var:
        return self._emit(op.sigmoid(x))

    def tanh(self, x: relax.Expr) -> relax.Var:
        return self._emit(op.tanh(x))

    def gelu(self, x: relax.Expr) -> relax.Var:
        return self._emit(op.nn.gelu(x))

    def softmax(self, x: relax.Expr) -> relax.Var:
        return self._emit(op.nn.softmax(x, axis=-1))

    def attention(self, query: relax.Expr, key: relax.Expr, value: relax.Expr, width: int) -> relax.Var:
        scores = self.matmul(self.permute(query, (0, 2, 1, 3)), self.permute(key, (0, 2, 3, 1)))
        scores = self._emit(op.multiply(scores, relax.const(width**-0.5, "float32")))
        return self.permute(self.matmul(self.softmax(scores), self.permute(value, (0, 2, 1, 3))), (0, 2, 1, 3))

    def concat(self, xs: Sequence[relax.Expr], axis: int) -> relax.Var:
        return self._emit(op.concat(list(xs), axis=axis))

    def reshape(self, x: relax.Expr, shape: Sequence[int]) -> relax.Var:
        return self._emit(op.reshape(x, tuple(shape)))

    def permute(self, x: relax.Expr, axes: Sequence[int]) -> relax.Var:
        return self._emit(op.permute_dims(x, list(axes)))

    def slice(self, x: relax.Expr, axis: int, begin: int, end: int) -> relax.Var:
        return self._emit(op.strided_slice(x, axes=[axis], begin=[begin], end=[end]))
