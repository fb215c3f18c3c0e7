"""One spelling for what importers and people write differently."""

from __future__ import annotations

import tvm
from tvm import relax

__all__ = ["with_out_dtypes"]


@relax.expr_functor.mutator
class _OutDtypes(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        attrs = call.attrs
        if attrs is None or getattr(attrs, "out_dtype", "given") is not None:
            return call
        info = type(attrs).__tvm_ffi_type_info__
        values = {field.name: getattr(attrs, field.name) for field in info.fields}
        values["out_dtype"] = call.ty.dtype.dtype
        return relax.Call(call.op, call.args, tvm.ir.make_node(info.type_key, **values), call.ty_args, call.span)


def with_out_dtypes(mod: tvm.IRModule) -> tvm.IRModule:
    """Write out the `out_dtype` of every call in "main" that leaves it open.

    matmul(a, b) -> matmul(a, b, out_dtype="float32") for float32 operands. PyTorch's importer writes it, ONNX's and
    people do not; rewrites of the graph then see one operator, not two.
    """
    mutator = _OutDtypes(mod)
    mutator.builder_.update_func(mod.get_global_var("main"), mutator.visit_expr(mod["main"]))
    return mutator.builder_.get()
