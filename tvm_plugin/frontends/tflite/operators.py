"""Operators of TFLite that TVM's importer lacks, or converts otherwise than TFLite computes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tflite
from tvm import relax
from tvm.relax import op as relax_op
from tvm.relax.frontend.tflite.tflite_frontend import get_scalar_from_constant, get_tensor_name

from ...dtypes import is_floating
from ...errors import UnsupportedModelError
from ...relax_ir.tensors import extents
from ..digits import remainder
from .boxes import selected_boxes
from .images import batch_to_space, nearest_pixels, space_to_batch
from .moves import options_of
from .quantised import Quantised
from .recurrent import sequence_lstm

__all__ = ["Converter"]

_WRONG = frozenset({"MATRIX_DIAG", "MATRIX_SET_DIAG", "SPARSE_TO_DENSE"})
"""What TVM's importer converts wrongly, or to what cannot be compiled."""

_LEAST_NORM = 1e-6
"""What L2_NORMALIZATION divides by at least."""


class Converter(Quantised):
    """TVM's converters, and others in the place of what it lacks or gets wrong.

    Raises
    ------
    UnsupportedModelError
        As `Quantised`, and for custom operators.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in _WRONG:
            del self.convert_map[name]

    def get_op_code_str(self, op: Any) -> str:
        """TVM's, whose error does not tell a custom operator's name."""
        try:
            return str(super().get_op_code_str(op))
        except NotImplementedError as error:
            custom = self.model.OperatorCodes(op.OpcodeIndex()).CustomCode()
            if custom is None:
                raise
            raise UnsupportedModelError(f"the custom operator {custom.decode()!r} cannot be imported") from error

    def convert_gelu(self, op: Any) -> relax.Expr:
        """TVM's is the exact one, whichever was asked for."""
        (x,) = self.get_input_tensors(op)
        approximate = options_of(op, tflite.GeluOptions()).Approximate()
        return (relax_op.nn.gelu_tanh if approximate else relax_op.nn.gelu)(self.get_tensor_expr(x))

    def convert_softmax(self, op: Any) -> relax.Expr:
        """TVM's leaves out the factor of its argument."""
        (x,), (output,) = self.get_input_tensors(op), self.get_output_tensors(op)
        value = self._in_float(x)
        beta = options_of(op, tflite.SoftmaxOptions()).Beta()
        if beta != 1:
            value = self.bb.normalize(relax_op.multiply(value, relax.const(beta, str(value.ty.dtype))))
        result = self.bb.normalize(relax_op.nn.softmax(value, axis=-1))
        return result if output.qnn_params is None else self.quantize(result, output)

    def convert_resize_nearest_neighbor(self, op: Any) -> relax.Expr:
        """TVM's rounds otherwise; where each pixel is merely repeated, that does not matter."""
        x, size = self.get_input_tensors(op)
        options = options_of(op, tflite.ResizeNearestNeighborOptions())
        given = [int(x.tensor.Shape(axis)) for axis in (1, 2)]
        wanted = [int(extent) for extent in self.get_tensor_value(size)]
        pixels = [
            nearest_pixels(*lengths, options.AlignCorners(), options.HalfPixelCenters())
            for lengths in zip(given, wanted, strict=True)
        ]
        repeated = [np.arange(of) * before // of for before, of in zip(given, wanted, strict=True)]
        repeats = all(of % before == 0 for before, of in zip(given, wanted, strict=True))
        if repeats and not options.AlignCorners() and all(map(np.array_equal, pixels, repeated)):
            return super().convert_resize_nearest_neighbor(op)
        rows, columns = map(relax.const, pixels)
        taken = self.bb.normalize(relax_op.take(self.get_tensor_expr(x), rows, axis=1))
        return relax_op.take(taken, columns, axis=2)

    def convert_space_to_batch_nd(self, op: Any) -> relax.Expr:
        """TVM's calls a function that takes other operands; quantised zeros are put around quantised images."""
        x, block, pads = self.get_input_tensors(op)
        zero = 0.0 if x.qnn_params is None else float(get_scalar_from_constant(x.qnn_params["zero_point"]))
        sizes = [int(extent) for extent in self.get_tensor_value(block)]
        return space_to_batch(self.bb.normalize, self.get_tensor_expr(x), sizes, self.get_tensor_value(pads), zero)

    def convert_batch_to_space_nd(self, op: Any) -> relax.Expr:
        """TVM's calls a function that takes other operands."""
        x, block, crops = self.get_input_tensors(op)
        sizes = [int(extent) for extent in self.get_tensor_value(block)]
        return batch_to_space(self.bb.normalize, self.get_tensor_expr(x), sizes, self.get_tensor_value(crops))

    def convert_scatter_nd(self, op: Any) -> relax.Expr:
        """TVM's permutes the indices, and does not add up what is written to one place."""
        indices, updates, shape = self.get_input_tensors(op)
        dtype = self.get_tensor_type_str(updates.tensor.Type())
        if dtype == "bool":
            raise UnsupportedModelError("SCATTER_ND of booleans cannot be imported")
        zeros = relax_op.zeros([int(extent) for extent in self.get_tensor_value(shape)], dtype)
        return relax_op.scatter_nd(
            self.bb.normalize(zeros), self.get_tensor_expr(indices), self.get_tensor_expr(updates), "add"
        )

    def _convert_segment_op(self, op: Any, op_name: str, reduction: str) -> relax.Expr:
        """TVM's counts negative numbers of segments from the end; TFLite leaves out what has them."""
        tensors = self.get_input_tensors(op)
        if op_name == "SEGMENT_SUM" or not self.has_expr(tensors[1].tensor_idx):
            return super()._convert_segment_op(op, op_name, reduction)
        data, numbers = map(self.get_tensor_expr, tensors[:2])
        emit, dtype = self.bb.normalize, str(numbers.ty.dtype)
        count = self._get_segment_num_segments(op_name, tensors)
        negative = emit(relax_op.less(numbers, relax.const(0, dtype)))
        behind = emit(relax_op.where(negative, relax.const(count, dtype), numbers))
        shape = [count + 1, *extents(data.ty)[numbers.ty.ndim :]]
        base = emit(self._get_segment_scatter_base(shape, str(data.ty.dtype), reduction))
        found = emit(relax_op.scatter_nd(base, emit(relax_op.expand_dims(behind, -1)), data, reduction))
        return relax_op.strided_slice(found, [0], [0], [count])

    def convert_l2_normalization(self, op: Any) -> relax.Expr:
        """TVM's adds 1e-12 to the sum of the squares; TFLite divides by 1e-6 at least, which small rows show."""
        (x,) = map(self.get_tensor_expr, self.get_input_tensors(op))
        emit, least = self.bb.normalize, relax.const(_LEAST_NORM, str(x.ty.dtype))
        squares = emit(relax_op.sum(emit(relax_op.multiply(x, x)), axis=-1, keepdims=True))
        result = emit(relax_op.divide(x, emit(relax_op.maximum(emit(relax_op.sqrt(squares)), least))))
        activation = options_of(op, tflite.L2NormOptions()).FusedActivationFunction()
        return self.convert_fused_activation_function(result, activation)

    def convert_unidirectional_sequence_rnn(self, op: Any) -> relax.Expr:
        """TVM's puts batches before steps, also where they are asked for the other way round."""
        result = self.bb.normalize(super().convert_unidirectional_sequence_rnn(op))
        if options_of(op, tflite.SequenceRNNOptions()).TimeMajor():
            return relax_op.permute_dims(result, [1, 0, 2])
        return result

    def convert_unidirectional_sequence_lstm(self, op: Any) -> relax.Expr:
        """TVM's knows no input gate, and wants to find the first states in the file. They begin with zeros here."""
        tensors = self.get_input_tensors(op)
        operands = [None if self._is_missing(tensor) else self.get_tensor_expr(tensor) for tensor in tensors]
        return sequence_lstm(self.bb, operands, options_of(op, tflite.UnidirectionalSequenceLSTMOptions()))

    def _is_missing(self, tensor: Any) -> bool:
        """Whether an operand is left out, or a state that nothing was written to."""
        if tensor.tensor_idx < 0:
            return True
        written = self.has_expr(tensor.tensor_idx) or tensor.buffer.DataLength()
        return bool(tensor.tensor.IsVariable()) and not written

    def convert_nms_v4(self, op: Any) -> relax.Expr:
        """TVM's has -1 behind the selected boxes, and leaves out scores that are not positive."""
        places, _, number = self._selected_boxes(op)
        return relax.Tuple([places, number])

    def convert_nms_v5(self, op: Any) -> relax.Expr:
        """As `convert_nms_v4`."""
        return relax.Tuple(self._selected_boxes(op))

    def _selected_boxes(self, op: Any) -> tuple[relax.Expr, ...]:
        boxes, scores, *numbers = self.get_input_tensors(op)
        most, overlap, threshold, *sigma = (self.get_tensor_value(number).item() for number in numbers)
        given = self.get_tensor_expr(boxes), self.get_tensor_expr(scores)
        return selected_boxes(self.bb.emit, given, most, overlap, threshold, sigma[0] if sigma else 0.0)

    def convert_select(self, op: Any) -> relax.Expr:
        """TVM's takes SELECT for SELECT_V2: a vector chooses among rows there, not among columns."""
        choices, x, _ = self.get_input_tensors(op)
        rank = x.tensor.ShapeLength()
        if self.get_op_code_str(op) != "SELECT" or choices.tensor.ShapeLength() != 1 or rank < 2:
            return super().convert_select(op)
        chosen, *values = map(self.get_tensor_expr, self.get_input_tensors(op))
        rows = relax_op.reshape(chosen, [int(choices.tensor.Shape(0)), *[1] * (rank - 1)])
        return relax_op.where(self.bb.normalize(rows), *values)

    def convert_split(self, op: Any) -> relax.Expr:
        """TVM's kernels of a split have several results: a single part is the tensor itself."""
        if options_of(op, tflite.SplitOptions()).NumSplits() == 1:
            return self.get_tensor_expr(self.get_input_tensors(op)[1])
        return super().convert_split(op)

    def convert_split_v(self, op: Any) -> relax.Expr:
        """TVM's does not know that one size may be -1: what the others leave. See `convert_split` for a single part."""
        x, given, axis = self.get_input_tensors(op)
        if self.has_expr(given.tensor_idx):
            return super().convert_split_v(op)
        sizes = [int(size) for size in self.get_tensor_value(given)]
        if len(sizes) == 1:
            return self.get_tensor_expr(x)
        if min(sizes) >= 0:
            return super().convert_split_v(op)
        along = int(self.get_tensor_value(axis).item())
        rest = extents(self.get_tensor_expr(x).ty)[along] - sum(sizes) - 1
        ends = np.cumsum([rest if size < 0 else size for size in sizes])[:-1]
        return relax_op.split(self.get_tensor_expr(x), [int(end) for end in ends], axis=along)

    def convert_squeeze(self, op: Any) -> relax.Expr:
        """TVM's needs axes to be named; without, all of one element go."""
        (x,) = self.get_input_tensors(op)
        named = options_of(op, tflite.SqueezeOptions()).SqueezeDimsLength()
        return super().convert_squeeze(op) if named else relax_op.squeeze(self.get_tensor_expr(x))

    def convert_bucketize(self, op: Any) -> relax.Expr:
        """TVM's puts what equals a boundary before it."""
        (x,), (output,) = self.get_input_tensors(op), self.get_output_tensors(op)
        boundaries = relax.const(options_of(op, tflite.BucketizeOptions()).BoundariesAsNumpy(), "float32")
        narrow = output.tensor.Type() == tflite.TensorType.INT32
        return relax_op.bucketize(self.get_tensor_expr(x), boundaries, out_int32=narrow, right=True)

    def convert_dequantize(self, op: Any) -> relax.Expr:
        """TVM's knows no constants of 8 bits, and no floats of 16 that are computed."""
        (x,) = self.get_input_tensors(op)
        value = self.get_tensor_expr(x)
        halves = x.tensor.Type() == tflite.TensorType.FLOAT16
        return relax_op.astype(value, "float32") if halves else self.dequantize(value, x)

    def convert_fake_quant(self, op: Any) -> relax.Expr:
        """TVM's finds the zero point in float64: of ranges such as -1 to 1, it is another one in float32."""
        (x,), options = map(self.get_tensor_expr, self.get_input_tensors(op)), options_of(op, tflite.FakeQuantOptions())
        low, high = np.float32(options.Min()), np.float32(options.Max())
        if not (2 <= options.NumBits() <= 16 and low < high):
            raise UnsupportedModelError("FAKE_QUANT without a range, or not of 2 to 16 bits, cannot be imported")
        least, most = np.float32(options.NarrowRange()), np.float32(2 ** options.NumBits() - 1)
        scale = (high - low) / (most - least)
        zero = np.float32(np.floor(np.clip(least - low / scale, least, most) + np.float64(0.5)))
        first, last = (float((limit - zero) * scale) for limit in (least, most))
        emit, step = self.bb.normalize, relax.const(float(scale), "float32")
        above = emit(relax_op.subtract(emit(relax_op.clip(x, first, last)), relax.const(first, "float32")))
        steps = emit(relax_op.multiply(above, relax.const(float(np.float32(1) / scale), "float32")))
        whole = emit(relax_op.floor(emit(relax_op.add(steps, relax.const(0.5, "float32")))))
        return relax_op.add(emit(relax_op.multiply(whole, step)), relax.const(first, "float32"))

    def convert_cast(self, op: Any) -> relax.Expr:
        """To the type that the file declares the result to be; TVM's is to that of the options, which may say none."""
        (x,), (output,) = self.get_input_tensors(op), self.get_output_tensors(op)
        return relax_op.astype(self.get_tensor_expr(x), self.get_tensor_type_str(output.tensor.Type()))

    def convert_batch_matmul(self, op: Any) -> relax.Expr:
        """TVM's knows neither constants nor batches of different sizes."""
        tensors = self.get_input_tensors(op)
        factors = [self.get_tensor_expr(tensor) for tensor in tensors]
        batches = [tuple(extents(factor.ty)[:-2]) for factor in factors]
        if batches[0] == batches[1] and all(self.has_expr(tensor.tensor_idx) for tensor in tensors):
            return super().convert_batch_matmul(op)
        options = options_of(op, tflite.BatchMatMulOptions())
        for number, transposed in enumerate((options.AdjX(), options.AdjY())):
            if transposed:
                *batch, rows, columns = range(len(extents(factors[number].ty)))
                factors[number] = self.bb.normalize(relax_op.permute_dims(factors[number], [*batch, columns, rows]))
        return relax_op.matmul(*factors)

    def convert_expand_dims(self, op: Any) -> relax.Expr:
        """TVM's calls its operator with an operand too many."""
        x, axis = self.get_input_tensors(op)
        return relax_op.expand_dims(self.get_tensor_expr(x), int(self.get_tensor_value(axis).item()))

    def convert_fully_connected(self, op: Any) -> relax.Expr:
        """TVM's takes rows as they are; TFLite's are as long as the weights', and a matrix unless it is told so."""
        x, weights = self.get_input_tensors(op)[:2]
        columns, expr = int(weights.tensor.Shape(1)), self.get_tensor_expr(x)
        shape = extents(expr.ty)
        if (len(shape) == 2 and shape[1] == columns) or options_of(op, tflite.FullyConnectedOptions()).KeepNumDims():
            return super().convert_fully_connected(op)
        rows = self.bb.normalize(relax_op.reshape(expr, [math.prod(shape) // columns, columns]))
        known = dict(self.exp_tab.exprs)
        self.exp_tab.set_expr(get_tensor_name(self.subgraph, x.tensor_idx), rows, force_override=True)
        result = super().convert_fully_connected(op)
        self.exp_tab.exprs = known
        return result

    def convert_embedding_lookup(self, op: Any) -> relax.Expr:
        """TVM's takes the indices for the table."""
        indices, table = map(self.get_tensor_expr, self.get_input_tensors(op))
        return relax_op.take(table, indices, axis=0)

    def _convert_elemwise(self, op: Any, relax_op: Any, comparison_op: bool = False) -> relax.Expr:
        """TVM's remainders of floats are differences: rounding errors of large quotients, NaN of infinite divisors."""
        ours = {relax.op.floor_mod: self._floor_mod, relax.op.right_shift: self._right_shift}
        return super()._convert_elemwise(op, ours.get(relax_op, relax_op), comparison_op)

    def _right_shift(self, x: relax.Expr, count: relax.Expr) -> relax.Expr:
        """By no less than nothing, and by no more than leaves the sign: LLVM's shift by other counts is undefined."""
        x, count = map(self.bb.normalize, (x, count))
        most = np.iinfo(str(x.ty.dtype)).bits - 1
        return relax_op.right_shift(x, self.bb.normalize(relax_op.clip(count, 0, most)))

    def _floor_mod(self, x: relax.Expr, divisor: relax.Expr) -> relax.Expr:
        """With the divisor's sign. Of floats by way of C's fmod, as in TFLite."""
        emit = self.bb.normalize
        x, divisor = map(emit, (x, divisor))
        dtype = str(x.ty.dtype)
        if not is_floating(dtype):
            return relax_op.floor_mod(x, divisor)
        return remainder(emit, x, divisor, dtype)

    def _convert_reduce(self, relax_op: Any, op: Any) -> relax.Expr:
        """TVM's means of integers are of another type; TFLite's are sums in 64 bits, divided without what remains."""
        x = self.get_input_tensors(op)[0]
        dtype = self.get_tensor_type_str(x.tensor.Type())
        if relax_op is not relax.op.mean or x.qnn_params is not None or dtype not in ("int32", "int64"):
            return super()._convert_reduce(relax_op, op)

        def wide_sum(value: relax.Expr, *options: Any) -> relax.Expr:
            return relax.op.sum(self.bb.normalize(relax.op.astype(value, "int64")), *options)

        total = self.bb.normalize(super()._convert_reduce(wide_sum, op))
        count = math.prod(extents(self.get_tensor_expr(x).ty)) // math.prod(extents(total.ty))
        mean = self.bb.normalize(relax.op.divide(total, relax.const(count, "int64")))
        return relax.op.astype(mean, dtype)

    def convert_pool2d(self, op: Any, pool_type: str) -> relax.Expr:
        """TVM's averages do not round; TFLite rounds halves away from zero, of the integers as they are stored."""
        (x,) = self.get_input_tensors(op)
        if pool_type != "average" or x.qnn_params is None:
            return super().convert_pool2d(op, pool_type)
        with self._replaced([x], lambda integers, _: relax_op.astype(integers, "float32")):
            self.convert_fused_activation_function = lambda mean, _: mean  # of integers, below
            mean = self.bb.normalize(super().convert_pool2d(op, pool_type))
            del self.convert_fused_activation_function
        size = self.bb.normalize(relax_op.floor(relax_op.add(relax_op.abs(mean), relax.const(0.5))))
        dtype = self.get_tensor_type_str(x.tensor.Type())
        rounded = self.bb.normalize(relax_op.astype(relax_op.multiply(relax_op.sign(mean), size), dtype))
        scale, zero = (get_scalar_from_constant(x.qnn_params[name]) for name in ("scale", "zero_point"))
        activation = options_of(op, tflite.Pool2DOptions()).FusedActivationFunction()
        return self.convert_qnn_fused_activation_function(rounded, activation, scale, zero, dtype)

    def convert_transpose_conv(self, op: Any) -> relax.Expr:
        """TVM's leaves out the activation, and rows at the end that the declared shape has and it does not need."""
        _, weights, x, *bias = self.get_input_tensors(op)
        options = options_of(op, tflite.TransposeConvOptions())
        (output,) = self.get_output_tensors(op)
        strides = (options.StrideH(), options.StrideW())
        before, after, added = [], [], []
        for axis, stride in enumerate(strides, 1):
            given, taps, wanted = (int(t.tensor.Shape(axis)) for t in (x, weights, output))
            whole = (given - 1) * stride + taps
            cut = max(0, whole - wanted)
            before.append(cut // 2)
            after.append(cut - cut // 2)
            added.append(wanted - whole + cut)
        if any(rows >= stride for rows, stride in zip(added, strides, strict=True)):
            raise UnsupportedModelError("TRANSPOSE_CONV whose result has rows that no input reaches cannot be imported")
        result = relax_op.nn.conv2d_transpose(
            self.get_tensor_expr(x),
            self.bb.normalize(relax_op.permute_dims(self.get_tensor_expr(weights), [3, 0, 1, 2])),
            strides=strides,
            padding=[*before, *after],
            output_padding=added,
            data_layout="NHWC",
            kernel_layout="IOHW",
        )
        for tensor in (given for given in bias if given.tensor_idx >= 0):
            result = relax_op.add(self.bb.normalize(result), self.get_tensor_expr(tensor))
        return self.convert_fused_activation_function(self.bb.normalize(result), options.FusedActivationFunction())
