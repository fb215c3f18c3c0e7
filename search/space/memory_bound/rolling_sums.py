"""Windows that roll down an image: each of its rows is read once, and counts in all windows that it is a part of.

    for y in range(28):                                     a[0:16], b[0:16] = 0, 0    # of windows that have begun
        s[lane] = 0                                         for t in range(30):
        for i, j in grid(3, 3):                       ->        c[0:16] = 0
            s[lane] += x[y + i, lane + j] * w[i, j]             for j in range(3):
        out[y, lane] = f(s[lane])                                   a[lane] += x[t, lane + j] * w[2, j]
                                                                    b[lane] += x[t, lane + j] * w[1, j]
                                                                    c[lane] += x[t, lane + j] * w[0, j]
                                                                if 2 <= t:
                                                                    out[t - 2, lane] = f(a[lane])
                                                                a, b = b, c

A tile of rows with its windows unrolled reads what is above and below it once more, and takes as many registers as it
has rows. Sums of several vectors, side by side, depend on nothing of each other. Where a row counts alike in all
windows, as in pooling, it is summed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import binding_of, conjuncts, guarded_loads, is_zero, nodes_of, substitute, uses
from ..marks import MASKED_LANES, ROLLING, ROLLING_STEP, WINDOW_ROW
from ..statements import block_with, in_order, rewrite_marked_loops, rewritten, stored_block, with_body

__all__ = ["roll_windows"]


def roll_windows(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked ROLLING; the same object when there is none.

    Inside are loops marked ROLLING_STEP, WINDOW_ROW and MASKED_LANES: the last remain marked.

    Any number of rows between two windows is right: it decides when a row counts in a window, never whether.

    Raises
    ------
    ValueError
        When inside is anything but vectors of one sum: its start, what is added in a window, and a store of it. Marks
        may come from records of others.
    """
    arguments = [parameter for parameter in func.params if hasattr(parameter.ty, "shape")]
    replaced: list[Any] = []

    def rolling(loop: Any) -> Any:
        windows = _Windows(loop, arguments)
        replaced.append(windows.sums)
        return windows.statement()

    def without_sums(block: Any) -> Any:
        kept = [buffer for buffer in block.alloc_buffers if not any(buffer.same_as(old) for old in replaced)]
        return block if len(kept) == len(block.alloc_buffers) else block_with(block, alloc_buffers=kept)

    func = rewrite_marked_loops(func, ROLLING, rolling)
    return rewritten(func, (s_tir.SBlock, without_sums)) if replaced else func


@dataclass(frozen=True)
class _Nest:
    """A marked vector in loops over a window's rows and columns, if it is about a window."""

    row: Any
    columns: tuple[Any, ...]
    vector: Any

    @property
    def store(self) -> Any:
        return self.vector.body.block.body


def _nests(statement: Any, row: Any = None, columns: tuple[Any, ...] = ()) -> Iterator[_Nest]:
    """The nests that follow each other in a statement, without loops of one iteration."""
    if isinstance(statement, tirx.SeqStmt):
        for part in statement.seq:
            yield from _nests(part, row, columns)
    elif not isinstance(statement, tirx.For):
        raise ValueError("what is marked to roll holds more than vectors")
    elif MASKED_LANES in statement.annotations:
        stored_block(statement)
        yield _Nest(row, columns, statement)
    elif WINDOW_ROW in statement.annotations:
        yield from _nests(statement.body, statement, columns)
    elif _extent(statement) == 1:
        yield from _nests(substitute(statement.body, [(statement.loop_var, statement.min)]), row, columns)
    else:
        yield from _nests(statement.body, row, (*columns, statement))


class _Windows:
    """The marked loops over vectors and rows, on the way to sums that roll.

    A step of `time` reads the rows of the image between two windows. The window that began `age` steps before is the
    one of the output's row `time - age`.
    """

    def __init__(self, across: Any, arguments: Sequence[Any]) -> None:
        down = across.body
        if not isinstance(down, tirx.For) or ROLLING_STEP not in down.annotations:
            raise ValueError(f"the loop over {across.loop_var} is marked to roll, but not around one over rows")
        self.across, self.down = across, down
        self.together, self.step = int(across.annotations[ROLLING]), int(down.annotations[ROLLING_STEP])
        nests = list(_nests(down.body))
        if [nest.row is None for nest in nests] != [True, False, True] or min(self.together, self.step) < 1:
            raise ValueError(f"the loop over {across.loop_var} is marked to roll, but does not hold one sum")
        self.begin, self.add, self.end = nests
        self.sums = self.begin.store.buffer
        own = not any(self.sums.same_as(buffer) for buffer in arguments)
        if not own or not self.sums.same_as(self.add.store.buffer) or self.begin.columns or self.end.columns:
            raise ValueError(f"the loop over {across.loop_var} is marked to roll, but its sums are not its own")
        if nodes_of(self.begin.store.value, ir.Var):  # it is set before a step knows which window will begin
            raise ValueError(f"the loop over {across.loop_var} is marked to roll, but its sums begin with no constant")
        self.lanes = int(self.add.vector.annotations[MASKED_LANES])
        self.rows, self.height = _extent(down), _extent(self.add.row)
        self.ages = -(-self.height // self.step)
        self.alike = self._counts_alike()
        self.exists = self._conditions_of_images()

    def statement(self) -> Any:
        """Vectors side by side, group by group."""
        groups, rest = divmod(_extent(self.across), self.together)
        index = self.across.loop_var
        dtype = str(index.ty.dtype)
        statements = []
        if groups:
            body = self._group([index * self.together + place for place in range(self.together)])
            kind, start = self.across.kind, self.across.min
            statements.append(tirx.For(index, start, tirx.IntImm(dtype, groups), kind, body))
        if rest:
            first = groups * self.together
            statements.append(self._group([tirx.IntImm(dtype, first + place) for place in range(rest)]))
        return in_order(statements)

    def _conditions_of_images(self) -> list[Any]:
        """Conditions on the loops around: threads that share images unevenly have places for more than there are."""
        realize, own = self.end.vector.body, (self.across, self.down, self.end.vector)
        conditions = conjuncts(substitute(realize.predicate, binding_of(realize)))
        return [condition for condition in conditions if not uses(condition, *(loop.loop_var for loop in own))]

    def _counts_alike(self) -> bool:
        """Whether a row of the image adds the same to all windows, so that its own sum can be added to theirs."""
        value = self.add.store.value
        if not (isinstance(value, tirx.Add | tirx.Max | tirx.Min) and self._is_sum(value.a)):
            return False
        if isinstance(value, tirx.Add) and not is_zero(self.begin.store.value):
            return False
        time, age, offset = (tirx.Var(name, str(self.down.loop_var.ty.dtype)) for name in ("time", "age", "offset"))
        realize = self.add.vector.body
        added = substitute(value.b, binding_of(realize))
        added = substitute(added, [(self.down.loop_var, time - age), (self.add.row.loop_var, offset + self.step * age)])
        return not uses(sym.Analyzer().simplify(added), age)

    def _group(self, vectors: list[Any]) -> Any:
        """All rows of the vectors at these places of a row."""
        self.kept: list[tuple[Any, Any]] = []
        sums = [[self._register() for _ in range(self.ages)] for _ in vectors]
        own = [register for of_vector in sums for register in of_vector]
        first = _constant(self.down, 0)
        statements = [self._placed(self.begin, register, vectors[0], first) for register in own]

        def step(time: Any, ages: Sequence[int]) -> list[Any]:
            of_vectors = zip(vectors, sums, strict=True)
            return [part for at, of_vector in of_vectors for part in self._step(at, time, ages, of_vector)]

        # Where all windows exist, in a loop; at both ends one by one.
        time = 0
        while time < self.rows + self.ages - 1:
            if time == self.ages - 1 and time < self.rows:
                body = in_order(step(self.down.loop_var, range(self.ages)))
                start, count = _constant(self.down, time), _constant(self.down, self.rows - time)
                statements.append(tirx.For(self.down.loop_var, start, count, tirx.ForKind.SERIAL, body))
                time = self.rows
            else:
                existing = [age for age in range(self.ages) if 0 <= time - age < self.rows]
                statements += step(_constant(self.down, time), existing)
                time += 1
        registers = [*own, *(register for _, register in self.kept)]
        loads = [tirx.BufferStore(register, load, [0]) for load, register in self.kept]
        for condition in self.exists if loads else ():
            loads = [tirx.IfThenElse(condition, in_order(loads), None)]
        return in_order([*map(tirx.AllocBuffer, registers), *loads, *statements])

    def _step(self, at: Any, time: Any, ages: Sequence[int], sums: list[Any]) -> Iterator[Any]:
        """The rows of the image that a step reads count in the windows of these ages; the oldest one is written."""
        for offset in range(self.step):
            counting = [age for age in ages if offset + age * self.step < self.height]
            if counting and self.alike:
                alone = self._register()
                yield tirx.AllocBuffer(alone)
                yield self._placed(self.begin, alone, at, time)
                yield self._placed(self.add, alone, at, time, counting[0], offset)
                combined = type(self.add.store.value)
                for age in counting:
                    yield self._whole(sums[age], combined(self._of(sums[age]), self._of(alone)))
            else:
                yield from (self._placed(self.add, sums[age], at, time, age, offset) for age in counting)
        if self.ages - 1 in ages:
            yield self._placed(self.end, sums[-1], at, time, self.ages - 1)
        for newer, older in reversed(list(itertools.pairwise(sums))):
            yield self._whole(older, self._of(newer))
        yield self._placed(self.begin, sums[0], at, time)

    def _placed(self, nest: _Nest, sums: Any, at: Any, time: Any, age: int = 0, offset: int = 0) -> Any:
        """A nest with its sums in a register: of the vector `at`, and the window and its row that a step is about."""
        values = [(self.across.loop_var, at), (self.down.loop_var, time - age)]
        if nest.row is not None:
            values.append((nest.row.loop_var, _constant(nest.row, offset + age * self.step)))
        places = itertools.product(*([(c.loop_var, _constant(c, n)) for n in range(_extent(c))] for c in nest.columns))
        return in_order([self._vector(nest.vector, sums, [*values, *place]) for place in places])

    def _vector(self, vector: Any, sums: Any, values: list[tuple[Any, Any]]) -> Any:
        """A marked vector with values for the loops around it."""
        lane, realize = vector.loop_var, vector.body
        binding = binding_of(realize)
        body = substitute(substitute(realize.block.body, binding), values)
        guarded = guarded_loads(body)

        def load(old: Any) -> Any:
            if self._is_sum(old):
                return tirx.BufferLoad(sums, [lane])
            stays = uses(old, lane, self.down.loop_var) or any(old.same_as(other) for other in guarded)
            return old if stays else self._from_register(old)

        def store(old: Any) -> Any:
            return tirx.BufferStore(sums, old.value, [lane]) if old.buffer.same_as(self.sums) else old

        body = tvm_ffi.structural_map(tvm_ffi.structural_map(body, (TensorLoad, load)), (tirx.BufferStore, store))
        predicate = substitute(substitute(realize.predicate, binding), values)
        iterations = [substitute(value, values) for value in realize.iter_values]
        return with_body(vector, s_tir.SBlockRealize(iterations, predicate, block_with(realize.block, body=body)))

    def _from_register(self, load: Any) -> Any:
        """A load that is the same in all rows, such as a weight: LLVM does not know that no store in a thread is one to
        it."""
        for known, register in self.kept:
            if tvm_ffi.structural_equal(known, load):
                return tirx.BufferLoad(register, [0])
        register = tirx.decl_buffer([1], str(load.ty.dtype), "kept")
        self.kept.append((load, register))
        return tirx.BufferLoad(register, [0])

    def _is_sum(self, value: Any) -> bool:
        return isinstance(value, TensorLoad) and value.source.same_as(self.sums)

    def _register(self) -> Any:
        return tirx.decl_buffer([self.lanes], str(self.sums.dtype), "sums")

    def _of(self, buffer: Any) -> Any:
        return tirx.BufferLoad(buffer, [tirx.Ramp(0, 1, self.lanes)])

    def _whole(self, buffer: Any, value: Any) -> Any:
        return tirx.BufferStore(buffer, value, [tirx.Ramp(0, 1, self.lanes)])


def _extent(loop: Any) -> int:
    if not isinstance(loop.extent, tirx.IntImm):
        raise ValueError(f"the loop over {loop.loop_var} is marked to roll, but how long it is varies")
    return int(loop.extent)


def _constant(loop: Any, value: int) -> Any:
    return tirx.IntImm(str(loop.loop_var.ty.dtype), value)
