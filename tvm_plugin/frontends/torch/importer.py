"""A program of torch.export as Relax: TVM's importer, with converters of our own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.export
import tvm
from torch.utils import _pytree as pytree
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ...errors import UnsupportedModelError
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import STEPS, seen_as
from ...runtime import first_line
from ..imported import KNOWN_SHAPES, is_number
from . import no_axes
from .constants import Constants, is_repetition, makes_number
from .converters import CONVERTERS, Converter
from .halves import OF_SEVERAL_STEPS, rounded_once
from .nodes import array_of_torch, calls_of, scalar
from .sizes import OpenSizes, is_size, number_of_sizes

__all__ = ["translated"]


def translated(program: torch.export.ExportedProgram, computed: Constants, name: str) -> tvm.IRModule:
    """The program as a module with a function "main"; UnsupportedModelError where TVM's importer fails."""
    importer = _Importer(program, computed)
    try:
        mod = importer.from_exported_program(
            program,
            False,
            unwrap_unit_return_tuple=True,
            no_bind_return_tuple=False,
            custom_convert_map=importer.converters,
        )
    except UnsupportedModelError:
        raise
    except Exception as error:  # the importer fails by assertions and errors of any kind
        what, advice = (f"{name} with open sizes", f"; {KNOWN_SHAPES}") if importer.sizes.parameters else (name, "")
        raise UnsupportedModelError(f"TVM's importer cannot translate {what}: {first_line(error)}{advice}") from error
    if importer.sizes.steps:
        mod["main"] = mod["main"].with_attr(STEPS, importer.sizes.steps)
    return mod


def _refuse_unsafe(graph: torch.fx.Graph) -> None:
    """Raise for what may only be computed where its branch is taken: CPUs stop at integers divided by zero, and indices
    that are none read beside their tensor."""
    for node in (node for node in graph.nodes if node.op == "call_function"):
        name = node.target.__name__.partition(".")[0]
        number = getattr(node.meta.get("val"), "dtype", torch.float32)
        divides = name in ("div", "floor_divide", "fmod", "remainder") and not number.is_floating_point
        if name in ("embedding", "gather", "index", "index_select", "take") or divides:
            raise UnsupportedModelError(f"{name} in a branch of torch.cond cannot be imported: both are computed")


class _Importer(ExportedProgramImporter):
    """TVM's importer, with constants of bfloat16, values that PyTorch has computed already, and sizes that are open."""

    def __init__(self, program: torch.export.ExportedProgram, computed: Constants) -> None:
        super().__init__()
        self._computed = computed
        self._constants: dict[tuple[Any, ...], tvm.ir.GenericConst] = {}
        self.sizes = OpenSizes({})
        converters = {name: _of_node_alone(convert) for name, convert in self.convert_map.items()} | CONVERTERS
        converters |= {name: rounded_once(converters[name]) for name in OF_SEVERAL_STEPS & converters.keys()}
        names = {node.target.__name__ for node in (*computed, *filter(makes_number, calls_of(program)))}
        self.converters = {name: self._converted(converters.get(name)) for name in converters.keys() | names}

    def create_input_vars(self, program: torch.export.ExportedProgram) -> Any:
        """As TVM's importer makes them, with open sizes of our own."""
        variables, inputs, bounds = super().create_input_vars(program)
        placeholders = program.graph.find_nodes(op="placeholder")
        values = {node.name: node.meta["val"] for node in placeholders if node.name in inputs}
        self.sizes = OpenSizes.of_inputs(values, inputs)
        return variables, inputs | self.sizes.parameters, self.sizes.bounds(bounds, program.range_constraints)

    def _translate_fx_graph(self, graph_module: Any, nodes: Any, inputs_vars: Any, custom_ops: Any = None) -> Any:
        """As TVM's importer does, which has no converters of ours in branches."""
        del custom_ops
        return super()._translate_fx_graph(graph_module, nodes, inputs_vars, set(self.converters))

    @staticmethod
    def _has_cond_op(nodes: Any) -> bool:
        """No: branches become choices."""
        del nodes
        return False

    def _cond(self, node: torch.fx.Node) -> tuple[relax.Expr, ...]:
        """`torch.cond`, whose branches only compute: of both, element by element, that of the one that is taken."""
        condition, *branches, given = node.args
        results = []
        for branch in branches:
            graph = self.env[branch].graph
            _refuse_unsafe(graph)
            names = [placeholder.name for placeholder in graph.find_nodes(op="placeholder")]
            inputs = dict(zip(names, map(self.env.__getitem__, given), strict=True))
            results.append(self._translate_fx_graph(self.env[branch], graph.nodes, inputs))
        emit = self.block_builder.emit
        is_taken = emit(relax.op.reshape(self.env[condition], []))
        return tuple(emit(relax.op.where(is_taken, *pair)) for pair in zip(*results, strict=True))

    def _converted(self, convert: Converter | None) -> Converter:
        """Of an operator: a constant where it is computed, else what `convert` makes of it."""

        def of_node(node: torch.fx.Node, importer: Any) -> Any:
            if node in self._computed and (convert is None or not is_repetition(node)):
                if all(user in self._computed and not is_repetition(user) for user in node.users):
                    return None  # whoever reads it is computed, too
                return pytree.tree_map_only(torch.Tensor, self._shared, self._computed[node])
            if makes_number(node):
                return self._number(node)
            assert convert is not None
            self._see_alike(node)
            return self._in_shape(node, no_axes.converted(convert, node, importer))

        return of_node

    def _see_alike(self, node: torch.fx.Node) -> None:
        """Let operands that meet have the shapes that PyTorch knows: equal ones, where TVM does not see that they are.

        What is alone keeps the shape that TVM gives it, so that a batch norm stays next to its convolution.
        """
        operands = [operand for operand in node.all_input_nodes if _has_open_shape(self.env[operand])]
        for operand in operands if len(operands) > 1 else ():
            value = operand.meta.get("val")
            if isinstance(value, torch.Tensor):
                wanted, given = [self.sizes(dim) for dim in value.shape], self.env[operand]
                if not all(map(self.sizes.are_equal, given.ty.shape, wanted)):
                    self.env[operand] = self.block_builder.emit(seen_as(given, wanted))

    def _number(self, node: torch.fx.Node) -> Any:
        """A size; nothing where nobody needs a number, as those that were compared while the program was exported."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymFloat):
            return number_of_sizes(value, self.sizes, self)
        return self.sizes(value) if isinstance(value, int | torch.SymInt) else None

    def _in_shape(self, node: torch.fx.Node, result: Any) -> Any:
        """A result in the shape that PyTorch knows, where TVM knows none."""
        value = node.meta.get("val")
        if isinstance(value, tuple | list) and isinstance(result, tuple | list):
            return tuple(self._tensor_in_shape(*pair) for pair in zip(value, result, strict=False))
        return self._tensor_in_shape(value, result)

    def _tensor_in_shape(self, value: Any, result: Any) -> Any:
        if not isinstance(value, torch.Tensor) or all(map(is_number, value.shape)):
            return result
        if not isinstance(result, relax.Expr) or not isinstance(result.ty, relax.TensorType):
            return result
        if result.ty.shape is not None:
            return result
        return self.block_builder.emit(seen_as(result, [self.sizes(dim) for dim in value.shape]))

    def _shared(self, tensor: torch.Tensor) -> tvm.ir.GenericConst:
        """One constant for all tensors of equal values: the masks that each layer makes anew."""
        array = array_of_torch(tensor)
        digest = hashlib.sha256(array.tobytes()).digest()
        return self._constants.setdefault((str(array.dtype), array.shape, digest), constant_of(array))

    @staticmethod
    def _convert_torch_tensor_to_relax(tensor: torch.Tensor) -> tvm.ir.GenericConst:
        return constant_of(array_of_torch(tensor))


def _of_node_alone(convert: Callable[[Any], Any]) -> Converter:
    """A converter of TVM's, called as ours are. Those of single elements take open sizes as tensors."""

    def of_node(node: torch.fx.Node, importer: Any) -> Any:
        env = importer.env
        tags = getattr(node.target, "tags", ())
        sizes = [operand for operand in node.all_input_nodes if torch.Tag.pointwise in tags and is_size(env[operand])]
        kept = {operand: env[operand] for operand in sizes}
        env |= {operand: scalar(size, "int64", importer) for operand, size in kept.items()}
        result = convert(node)
        env |= kept
        return result

    return of_node


def _has_open_shape(value: Any) -> bool:
    """Whether a value is a tensor of known rank and sizes that are open."""
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType) or value.ty.shape is None:
        return False
    return not all(map(is_number, value.ty.shape))
