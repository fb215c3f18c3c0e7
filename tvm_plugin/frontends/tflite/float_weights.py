"""What a TFLite model computes if activations are not rounded where its weights alone are of 8 bits.

Beside such weights ("dynamic range quantization") LiteRT quantises activations anew for each input. Here they stay
floats, which is nearer to the model; so they do in LiteRT where the weights come to an operator as floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

__all__ = ["with_float_weights"]


def with_float_weights(content: bytes, names: Set[str]) -> bytes:
    """A file's content with a DEQUANTIZE before weights of 8 bits, in operators of these names on data in floats.

    The content as it is, where there are no such weights.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(content)
    dequantize = schema.OperatorCodeT()
    dequantize.builtinCode = dequantize.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    dequantize.version = 5  # the last one, of scales along any axis
    hybrid = {getattr(schema.BuiltinOperator, name) for name in names}
    codes = [max(code.builtinCode, code.deprecatedBuiltinCode) for code in model.operatorCodes]
    changed = False
    for graph in model.subgraphs:
        operators = list(_with_dequantized_inputs(schema, graph, codes, hybrid))
        changed |= len(operators) > len(graph.operators or ())
        graph.operators = operators
    if not changed:
        return content
    model.operatorCodes.append(dequantize)
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _with_dequantized_inputs(schema: Any, graph: Any, codes: list[int], hybrid: Set[int]) -> Iterator[Any]:
    """The operators of a graph, before some of them new ones, whose code comes after the known ones."""
    floats: dict[int, int] = {}
    for operator in graph.operators or ():
        code = codes[operator.opcodeIndex]
        place = 2 if code == schema.BuiltinOperator.TRANSPOSE_CONV else 0
        if code in hybrid and graph.tensors[operator.inputs[place]].type == schema.TensorType.FLOAT32:
            for index in {int(index) for index in operator.inputs} - floats.keys():
                if index >= 0 and _is_of_8_bits(schema, graph.tensors[index]):
                    floats[index] = len(graph.tensors)
                    yield _appended(schema, graph, index, len(codes))
            operator.inputs = [floats.get(int(index), int(index)) for index in operator.inputs]
        yield operator


def _is_of_8_bits(schema: Any, tensor: Any) -> bool:
    scaled = tensor.quantization is not None and tensor.quantization.scale is not None
    return scaled and tensor.type in (schema.TensorType.INT8, schema.TensorType.UINT8)


def _appended(schema: Any, graph: Any, index: int, code: int) -> Any:
    """The operator that makes a tensor of floats, appended to the graph's, of one that is there."""
    given, tensor = graph.tensors[index], schema.TensorT()
    tensor.shape, tensor.type, tensor.name = given.shape, schema.TensorType.FLOAT32, f"floats{len(graph.tensors)}"
    graph.tensors.append(tensor)
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = code, [index], [len(graph.tensors) - 1]
    return operator
