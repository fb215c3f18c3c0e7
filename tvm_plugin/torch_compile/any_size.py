"""A captured graph whose sizes differ from call to call: compiled once for all of them, without measuring kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm import relax

from ..frontends.torch.model import from_exported_program
from ..frontends.verify import compare
from ..machine import detect_target
from ..pipeline import eqtune_pipeline
from ..runtime import ModelRunner, first_line
from ..tune.accuracy import ROUNDINGS, TOLERANCE
from ..tune.open_sizes import limits_of
from ..tune.result import Limit
from .memory import InOrder, Layout, View, copy_of
from .stays import Stays
from .tuned import Tuned

__all__ = ["NUMBERS_DIFFER", "AnySize", "Sizes", "check_other_sizes", "compiled", "in_order", "sizes_of"]

NUMBERS_DIFFER = "numbers differ from call to call; with torch.compile(dynamic=False) each is tuned by itself"

MOST_COMPARED = 3
"""With so many sizes, those of the first call among them, outputs are compared."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a captured graph that differ from call to call.

    Attributes
    ----------
    numbers : mapping
        Of an argument that is a number: the argument and the dimension that it is the size of.
    dimensions : mapping
        Of an argument that is a tensor: its dimensions of such sizes, and what Dynamo calls them.
    """

    numbers: Mapping[int, tuple[int, int]]
    dimensions: Mapping[int, Mapping[int, str]]

    def __bool__(self) -> bool:
        return bool(self.dimensions)

    def others(self, arguments: Sequence[Any]) -> Iterator[list[Any]]:
        """The arguments with other sizes, each one more, and each twice as large: their elements repeat. Then so with
        one size alone: others may have to fit each other, as those of images that become rows of a product.
        """
        names = dict.fromkeys(name for dimensions in self.dimensions.values() for name in dimensions.values())
        alone = [{name} for name in names] if len(names) > 1 else []
        for larger, (factor, more) in itertools.product([set(names), *alone], ((1, 1), (2, 0))):
            changed = list(arguments)
            for index, dimensions in self.dimensions.items():
                for dimension in (dimension for dimension, name in dimensions.items() if name in larger):
                    extent = arguments[index].size(dimension)
                    places = torch.arange(extent * factor + more) % extent
                    changed[index] = changed[index].index_select(dimension, places)
            for index, (source, dimension) in self.numbers.items():
                changed[index] = changed[source].size(dimension)
            yield changed


class AnySize:
    """The compiled graph, which takes tensors of any of its sizes: those within the limits."""

    def __init__(self, executable: relax.VMExecutable, threads: int | None, limits: Sequence[Limit]) -> None:
        self.limits = tuple(limits)
        self._runner = ModelRunner(executable, threads=threads)

    def run_tensors(self, *inputs: torch.Tensor) -> list[Any]:
        """As `TuneResult.run_tensors`."""
        return self._runner.on_tensors([tvm.runtime.from_dlpack(given) for given in inputs])


def sizes_of(graph: torch.fx.GraphModule, arguments: Sequence[Any]) -> Sizes:
    """The sizes that Dynamo left open.

    Raises Stays where numbers are no sizes, sizes are computed of others, or a tensor has no elements: its strides are
    others in PyTorch and TVM.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("example_value") for node in nodes]
    places: dict[str, tuple[int, int]] = {}
    dimensions: dict[int, dict[int, str]] = {}
    for index, example in enumerate(examples):
        if not isinstance(example, torch.Tensor):
            continue
        for dimension, extent in enumerate(example.shape):
            if isinstance(extent, torch.SymInt) and extent.node.expr.free_symbols:
                name = str(extent.node.expr)
                if not name.isidentifier():
                    raise Stays(f"a size of what it is given is {name}")
                dimensions.setdefault(index, {})[dimension] = name
                places.setdefault(name, (index, dimension))
    numbers = {}
    for index, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            if dimensions and not value.numel():
                raise Stays("it takes a tensor without elements, and sizes differ from call to call")
            continue
        name = str(examples[index].node.expr) if isinstance(examples[index], torch.SymInt) else ""
        if not isinstance(value, int) or name not in places:
            raise Stays(NUMBERS_DIFFER)
        numbers[index] = places[name]
    return Sizes(numbers, dimensions)


def in_order(outputs: Sequence[Any]) -> list[Any]:
    """What a graph returns, of whatever shape. Raises Stays where that is a view, or has gaps."""
    if any(isinstance(output, View) for output in outputs):
        raise Stays("it returns a view, and sizes differ from call to call")
    return [InOrder.of(output) if isinstance(output, Layout) else output for output in outputs]


def compiled(program: torch.export.ExportedProgram, threads: int | None, fast_math: bool) -> AnySize:
    """An exported program with dynamic sizes. Raises Stays for what cannot be imported or compiled."""
    try:
        imported = from_exported_program(program, {}, any_size=True)
        pipeline = eqtune_pipeline(fast_math=fast_math)
        executable = relax.build(imported.mod, detect_target(threads), relax_pipeline=pipeline)
        return AnySize(executable, threads, limits_of(imported))
    except Exception as error:  # TVM raises anything
        raise Stays(f"it cannot be compiled for any size: {first_line(error)}") from error


def check_other_sizes(tuned: Tuned, graph: torch.fx.GraphModule, arguments: Sequence[Any], sizes: Sizes) -> None:
    """Compare with PyTorch, for these sizes and others. Raises Stays where they differ, or none other is possible."""
    compared = 0
    for given in itertools.chain([[*arguments]], sizes.others(arguments)):
        if compared == MOST_COMPARED:
            break
        if not tuned.fits(given):  # Dynamo captures another graph for these, or this one runs as it is
            continue
        try:
            returned = graph.forward(*map(copy_of, given))  # the module itself prints what its code raises
        except (RuntimeError, IndexError, ValueError):  # more places than the model knows, say
            continue
        wanted = [value for value in returned if isinstance(value, torch.Tensor)]
        try:
            found = tuned.compute(given)
        except Exception as error:  # TVM raises anything, as for sizes that Dynamo's guards exclude
            raise Stays(f"compiled for any size, it fails with another: {first_line(error)}") from error
        _, difference = compare([*map(_array, found)], [*map(_array, wanted)])
        if not difference <= max(map(_tolerance, wanted)):
            raise Stays(f"compiled for any size, its outputs differ from PyTorch's by {difference:.1e}")
        compared += 1
    if compared < 2:
        raise Stays("its sizes differ from call to call, and it runs with no other one")


def _array(tensor: torch.Tensor) -> Any:
    """A tensor's values; bfloat16 is none of numpy's dtypes."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


def _tolerance(tensor: torch.Tensor) -> float:
    """Largest difference accepted, relative to the largest magnitude, as `tune_model` accepts it."""
    return max(TOLERANCE, ROUNDINGS * torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0
