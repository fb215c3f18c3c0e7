"""PyTorch models: a torch.nn.Module is exported, an ExportedProgram is translated to Relax.

The exported graph is made functional (no in-place operators, no training forms), operators that TVM's importer does not
know are decomposed, and only those: a full decomposition turns a BERT's 48 reshapes into 264.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import re
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.export
import tvm
from numpy.typing import NDArray
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ..errors import InputError, UnsupportedModelError
from ..runtime import first_line
from ..transform.constants import constant_of
from ..transform.functions import seen_as
from .imported import KNOWN_SHAPES, ImportedModel, Reference, check_shapes, check_static, imported_model, is_number
from .relax_model import bind_shapes
from .torch_complex import has_complex_numbers, with_real_numbers
from .torch_constants import ASSERTIONS, LIKE_ANOTHER, NUMBERS, Constants, is_repetition
from .torch_converters import CONVERTERS, Converter
from .torch_experts import EXPERT_DECOMPOSITIONS
from .torch_fast_paths import FAST_PATH_DECOMPOSITIONS
from .torch_nodes import array_of_torch, scalar, torch_of_array
from .torch_order import EqualsInOrder
from .torch_sizes import OpenSizes, is_size, number_of_sizes
from .torch_state import WithState, changed_buffers, decomposed, register_caches

__all__ = ["exported", "from_exported_program", "from_module", "quiet"]

OUR_DECOMPOSITIONS = EXPERT_DECOMPOSITIONS | FAST_PATH_DECOMPOSITIONS


def from_module(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None,
    shapes: Mapping[str, Sequence[int]],
) -> ImportedModel:
    """Export `module` in evaluation mode (it keeps its own mode) for the shapes of `example_inputs`, and import it.

    Inputs are positional, or keywords where they are a mapping.

    Raises
    ------
    InputError
        There are no example inputs, or they are not tensors, or torch.export cannot follow the model with them.
    """
    if example_inputs is None:
        raise InputError("a torch.nn.Module needs example_inputs=(tensor, ...): the shapes to tune for")
    given: Any = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    register_caches(given)
    given = _as_tensors(dict(given) if isinstance(given, Mapping) else tuple(given))
    arguments, keywords = ((), given) if isinstance(given, dict) else (given, {})
    name = type(module).__name__
    with _evaluating(module), _unchanged(module), quiet():
        program = exported(module, arguments, keywords, name)
        strict = False
        try:
            changed = changed_buffers(program)
        except UnsupportedModelError:  # buffers that several modules share
            strict = True
            program = exported(module, arguments, keywords, name, strict)
            changed = changed_buffers(program)
        if changed:
            module = WithState(module, changed, arguments, keywords)
            program = exported(module, module.arguments, module.keywords, name, strict)

    def evaluate(*arguments: Any, **keywords: Any) -> Any:
        with _evaluating(module):
            return module(*arguments, **keywords)

    return from_exported_program(program, shapes, name, evaluate)


def from_exported_program(
    program: torch.export.ExportedProgram,
    shapes: Mapping[str, Sequence[int]],
    name: str = "torch",
    evaluate: Callable[..., Any] | None = None,
    any_size: bool = False,
) -> ImportedModel:
    """Translate `program` to Relax; `evaluate` is the model itself if there is more than the program.

    Raises
    ------
    UnsupportedModelError
        The program changes its inputs, takes something other than tensors, has dynamic dimensions that
        `shapes` does not give (unless `any_size` lets them be), or has an operator that TVM's importer does not know.
    InputError
        `shapes` does not fit the inputs.
    """
    with quiet():
        changed = [] if evaluate is not None else changed_buffers(program)
        if changed:
            program, evaluate, shapes = *_with_state(_specialised(program, shapes, name), changed, name), {}
        _check_signature(program)
        wanted = program if any_size and not shapes else _specialised(program, shapes, name)
        wanted = with_real_numbers(wanted, name) if has_complex_numbers(wanted) else wanted
        mod = _translated(*_translatable(wanted), name)
    mod = relax.transform.DeadCodeElimination(["main"])(bind_shapes(mod, shapes))
    reference = _reference(program, evaluate or program.module())
    return imported_model(mod, name, "torch", reference, examples=_examples(program), any_size=any_size)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch says of its own code: torch.export uses what torch deprecates, and logs what it then raises."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    levels = {handler: handler.level for logger in loggers for handler in logger.handlers}
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")  # LSTM, detectors
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")  # buffers that change
        try:
            for handler in levels:
                handler.setLevel(logging.CRITICAL)
            yield
        finally:
            for handler, level in levels.items():
                handler.setLevel(level)


@contextlib.contextmanager
def _without_graph() -> Iterator[None]:
    """Let what is written to standard error pass, but for the graph that torch.export prints, twice, where it fails."""
    written, graph = io.StringIO(), ""
    try:
        with contextlib.redirect_stderr(written):
            yield
    except Exception as error:
        graph = f"{error.partial_fx_graph}\n" if hasattr(error, "partial_fx_graph") else ""
        raise
    finally:
        sys.stderr.write(written.getvalue().replace(graph, ""))


def _with_state(
    program: torch.export.ExportedProgram, changed: Sequence[str], name: str
) -> tuple[torch.export.ExportedProgram, WithState]:
    """A program that changes buffers, as one that takes and returns them; and what it was made of."""
    if program.example_inputs is None:
        raise UnsupportedModelError("the model changes its buffers, and its program holds no example inputs")
    module = WithState(program.module(), changed, *program.example_inputs)
    return exported(module, module.arguments, module.keywords, name), module


def exported(
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    name: str,
    strict: bool = False,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """What torch.export makes of a module, which the error calls `name`. Raises InputError where it cannot."""
    try:
        with _without_graph():
            return torch.export.export(module, arguments, keywords, dynamic_shapes=dynamic_shapes, strict=strict)
    except Exception as error:  # the model's own code runs, which may raise anything
        foreign = re.search(r"Found <class '(?:.*\.)?(\w+)'> in output", str(error))
        if foreign:
            raise InputError(
                f"torch.export cannot export {name}, which returns {foreign[1]}, no tensor: let a module around it "
                "return tensors (language models of Hugging Face return no cache with model.config.use_cache = False)"
            ) from error
        raise InputError(f"torch.export cannot export {name}: {first_line(error)}") from error


def _specialised(
    program: torch.export.ExportedProgram, shapes: Mapping[str, Sequence[int]], name: str
) -> torch.export.ExportedProgram:
    """`program` with the extents that `shapes` gives to its dynamic dimensions: its converters compute with them."""
    placeholders = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = {input_name: placeholders[input_name] for input_name in program.graph_signature.user_inputs}
    if all(is_number(dim) for value in inputs.values() for dim in value.shape):
        return program
    check_shapes(shapes, list(inputs))
    extents = _dynamic_extents(inputs, shapes)
    tensors = []
    for input_name, value in inputs.items():
        shape = shapes.get(input_name) or [extents.get(str(dim), dim) for dim in value.shape]
        check_static(shape, f"input {input_name!r}")
        tensors.append(torch.zeros(tuple(shape), dtype=value.dtype))
    arguments, keywords = pytree.tree_unflatten(tensors, program.call_spec.in_spec)
    return exported(program.module(), arguments, keywords, name)


def _dynamic_extents(inputs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """By the names that torch gave the dynamic dimensions, which several inputs may share."""
    extents: dict[str, int] = {}
    for name, shape in shapes.items():
        dims = inputs[name].shape
        if len(dims) != len(shape) or any(is_number(d) and d != n for d, n in zip(dims, shape, strict=True)):
            raise InputError(
                f"input {name!r} is ({', '.join(map(str, dims))}), which the shape {tuple(shape)} does not fit"
            )
        for dim, extent in zip(dims, shape, strict=True):
            if not is_number(dim) and extents.setdefault(str(dim), extent) != extent:
                raise InputError(f"the dynamic dimension {dim} would be both {extents[str(dim)]} and {extent}")
    return extents


class _Importer(ExportedProgramImporter):
    """TVM's importer, with constants of bfloat16, values that PyTorch has computed already, and sizes that are open."""

    def __init__(self, program: torch.export.ExportedProgram, computed: Constants) -> None:
        super().__init__()
        self._computed = computed
        self._constants: dict[tuple[Any, ...], tvm.ir.GenericConst] = {}
        self.sizes = OpenSizes({})
        converters = {name: _of_node_alone(convert) for name, convert in self.convert_map.items()} | CONVERTERS
        names = {node.target.__name__ for node in (*computed, *filter(_is_number, program.graph.nodes))}
        self.converters = {name: self._converted(converters.get(name)) for name in converters.keys() | names}

    def create_input_vars(self, program: torch.export.ExportedProgram) -> Any:
        """As TVM's importer makes them, with open sizes of our own."""
        variables, inputs, bounds = super().create_input_vars(program)
        placeholders = program.graph.find_nodes(op="placeholder")
        values = {node.name: node.meta["val"] for node in placeholders if node.name in inputs}
        self.sizes = OpenSizes.of_inputs(values, inputs)
        return variables, inputs | self.sizes.parameters, self.sizes.bounds(bounds, program.range_constraints)

    def _converted(self, convert: Converter | None) -> Converter:
        """Of an operator: a constant where it is computed, else what `convert` makes of it."""

        def of_node(node: torch.fx.Node, importer: Any) -> Any:
            if node in self._computed and (convert is None or not is_repetition(node)):
                if all(user in self._computed and not is_repetition(user) for user in node.users):
                    return None  # whoever reads it is computed, too
                return pytree.tree_map_only(torch.Tensor, self._shared, self._computed[node])
            if _is_number(node):
                return self._number(node)
            assert convert is not None
            self._see_alike(node)
            return self._in_shape(node, convert(node, importer))

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
        return _constant_of_torch(tensor)


def _constant_of_torch(tensor: torch.Tensor) -> tvm.ir.GenericConst:
    return constant_of(array_of_torch(tensor))


def _translated(program: torch.export.ExportedProgram, computed: Constants, name: str) -> tvm.IRModule:
    importer = _Importer(program, computed)
    try:
        return importer.from_exported_program(
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


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a call makes a number of sizes, or only asserts something of one."""
    if node.op != "call_function" or node.target in _OF_DATA:
        return False
    asserts = node.target in ASSERTIONS and not any(_is_tensor(operand) for operand in node.all_input_nodes)
    return asserts or isinstance(node.meta.get("val"), NUMBERS)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _as_tensors(example_inputs: Any) -> Any:
    def convert(leaf: Any) -> Any:
        leaf = torch_of_array(leaf) if isinstance(leaf, np.ndarray) else leaf
        if not isinstance(leaf, torch.Tensor):
            raise InputError(f"example_inputs holds {leaf!r}; every input must be a tensor or a numpy array")
        return leaf

    tensors = pytree.tree_map(convert, example_inputs)
    leaves = pytree.tree_leaves(tensors)
    first = next((i for i, leaf in enumerate(leaves) if any(leaf is other for other in leaves[:i])), None)
    if first is not None:
        raise InputError(
            f"input {first} of example_inputs is the same tensor as an earlier one, which torch.export would build on; "
            "give a clone of it, or wrap the module in one that takes the tensor once"
        )
    return tensors


def _examples(program: torch.export.ExportedProgram) -> tuple[NDArray[Any], ...]:
    """What the program was exported with, input by input."""
    leaves = pytree.tree_leaves(program.example_inputs) if program.example_inputs else []
    wanted = len(program.graph_signature.user_inputs)
    if len(leaves) != wanted or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return ()
    return tuple(array_of_torch(leaf) for leaf in leaves)


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; each submodule gets back the mode that it had."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


_OF_DATA = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}
"""What makes numbers of tensors' elements."""

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""Not what is derived from them, which may refuse to be changed."""


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Take back what a module assigns to its attributes meanwhile, or puts into dictionaries and lists there: detectors
    keep their anchors, which in an export are no numbers, and would compute with them from then on.
    """
    kept: dict[int, tuple[Any, Any]] = {}
    waiting: list[Any] = [vars(child) for child in module.modules()]
    while waiting:
        container = waiting.pop()
        if type(container) in _CONTAINERS and id(container) not in kept:
            kept[id(container)] = container, container.copy()
            waiting += container.values() if isinstance(container, dict) else container
        elif type(container) is tuple:
            waiting += container
    try:
        yield
    finally:
        for container, before in kept.values():
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)


def _check_signature(program: torch.export.ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            raise UnsupportedModelError(
                f"the model changes {spec.target!r} when it runs; buffers may change, but not inputs, parameters or "
                "what norms keep (was it exported in training mode? call model.eval() first)"
            )
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT and not isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
            raise UnsupportedModelError(f"the input {spec.arg.name!r} is not a tensor; export the model with it fixed")


def _check_not_random(program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        if any(user.target not in LIKE_ANOTHER for user in node.users) and _draws(node):
            raise UnsupportedModelError(
                f"the model draws random numbers ({node.target}), which would be the same in each run here; make them "
                "an input of the model"
            )


_RANDOM = re.compile(
    r"aten\.(rand|normal|log_normal|bernoulli|binomial|multinomial|uniform|exponential|poisson|cauchy|geom)"
)
_DROPOUT = re.compile(r"aten\.(native_|alpha_|feature_)*dropout")


def _draws(node: torch.fx.Node) -> bool:
    """Whether a node's result is random, as a dropout in training mode is."""
    name = str(node.target) if node.op == "call_function" else ""
    if _DROPOUT.match(name):
        train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
        return train is None or bool(train)
    return _RANDOM.match(name) is not None


def _unknown(program: torch.export.ExportedProgram, computed: Constants) -> set[Any]:
    """Operators that have no converter, but for those of constants."""
    known = ExportedProgramImporter().convert_map.keys() | CONVERTERS.keys()
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and node not in computed]
    return {node.target for node in nodes if node.target.__name__ not in known and not _is_number(node)}


def _translatable(program: torch.export.ExportedProgram) -> tuple[torch.export.ExportedProgram, Constants]:
    """The program in operators that have converters, but for those of its constants.

    torch.export takes about a second each time. What the program calls as it is given is decomposed at once; only what
    comes of that may need more.
    """
    defaults = functools.cache(lambda: dict(torch.export.default_decompositions()))

    def decompositions(unknown: set[Any]) -> dict[Any, Callable[..., Any]]:
        ours = {one: OUR_DECOMPOSITIONS[str(one)] for one in unknown if str(one) in OUR_DECOMPOSITIONS}
        others = unknown - ours.keys()
        return ours | ({one: defaults()[one] for one in others if one in defaults()} if others else {})

    table = decompositions(_unknown(program, Constants(program)))
    while True:
        functional = decomposed(program, table)
        computed = Constants(functional)
        unknown = _unknown(functional, computed)
        helpful = decompositions(unknown - table.keys())
        if not helpful:
            break
        table |= helpful
    _check_not_random(functional)
    if unknown:
        names = ", ".join(sorted(str(one) if hasattr(one, "namespace") else one.__name__ for one in unknown))
        raise UnsupportedModelError(f"TVM's importer does not know the PyTorch operators {names}")
    _check_signature(functional)  # in-place updates of buffers show only now
    _keep_tensors(functional)
    return functional, computed


def _keep_tensors(program: torch.export.ExportedProgram) -> None:
    """Leave out of a program's outputs what is no tensor, as weights of attention that nobody asked for: None."""
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    kept = [
        (value, spec) for value, spec in zip(output.args[0], specs, strict=True) if isinstance(value, torch.fx.Node)
    ]
    output.args = (tuple(value for value, _ in kept),)
    specs[:] = [spec for _, spec in kept]


def _reference(program: torch.export.ExportedProgram, evaluate: Callable[..., Any]) -> Reference:
    in_spec = program.call_spec.in_spec

    def reference(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
        tensors = [torch_of_array(array) for array in arrays]
        arguments, keywords = pytree.tree_unflatten(tensors, in_spec)
        with torch.no_grad(), EqualsInOrder():
            outputs = evaluate(*arguments, **keywords)
        leaves = pytree.tree_leaves(outputs)
        return [array_of_torch(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    return reference
