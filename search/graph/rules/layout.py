"""Permutations, reshapes and broadcasts, with each other and with element-wise functions."""

from __future__ import annotations

from ..attributes import Permute, Shape, Slice
from .pattern import binary, broadcast, permute, reshape, slice_, tensors, unary, weights
from .rule import Match, Rule, both_ways
from .shapes import broadcasts_to, columns_only, inverse, same_shape

__all__ = ["LAYOUT_RULES"]

x, y = tensors("x y")
w, n = weights("w n")


def keeps_order(m: Match) -> bool:
    """The permutation is the identity."""
    return list(m.p.axes) == sorted(m.p.axes)


def moves_units_only(m: Match) -> bool:
    """The permutation keeps the order of the dimensions that are longer than 1."""
    longer = [axis for axis in m.p.axes if m.x.shape[axis] != 1]
    return longer == sorted(longer)


def changes_order(m: Match) -> bool:
    """The permutation is not the identity."""
    return not keeps_order(m)


def keeps_shape(m: Match) -> bool:
    """The result has the shape of x."""
    return bool(m.out[0] == m.x)


def same_rank(m: Match) -> bool:
    """x and y have the same number of dimensions."""
    return len(m.x.shape) == len(m.y.shape)


def does_not_enlarge(m: Match) -> bool:
    """w broadcasts to what it is combined with."""
    return broadcasts_to(m.w.shape, m.type(_MOVED).shape)


def several(m: Match) -> bool:
    """w is more than one number."""
    return bool(m.w.elements > 1)


def single(m: Match) -> bool:
    """n has no dimensions."""
    return not m.n.shape


def row_of_both(m: Match) -> bool:
    """n has no dimensions; or it is a row, of the length that the last dimension has before and after the reshape."""
    before, after = m.x.shape, m.r.shape
    return not m.n.shape or bool(before and after and (before[-1],) == (after[-1],) == m.n.shape)


def is_row_with_units(m: Match) -> bool:
    """w varies along its last dimension only, and has others, which do not enlarge x."""
    return len(m.w.shape) > 1 and columns_only(m.w.shape) and broadcasts_to(m.w.shape, m.x.shape)


def broadcast_is_implied(m: Match) -> bool:
    """Without the broadcast, the result has the same shape."""
    return broadcasts_to(m.x.shape, m.y.shape) and bool(m.out[0] == m.y)


def groups_stay_together(m: Match) -> bool:
    """The reshape splits the last dimension, and the slice begins and ends between the pieces."""
    rank = len(m.x.shape)
    piece = m.r.shape[-1] if m.r.shape else 0
    return bool(
        rank
        and len(m.r.shape) == rank + 1
        and m.r.shape[:-2] == tuple(e - b for b, e in zip(m.s.begin[:-1], m.s.end[:-1], strict=True))
        and piece
        and m.s.begin[-1] % piece == m.s.end[-1] % piece == m.x.shape[-1] % piece == 0
    )


def _composed(m: Match) -> Permute:
    return Permute(tuple(m.inner.axes[axis] for axis in m.outer.axes))


def _full_rank(m: Match) -> Shape:
    """w with as many dimensions as what is permuted."""
    return Shape((1,) * (len(m.p.axes) - len(m.w.shape)) + m.w.shape)


def _row(m: Match) -> Shape:
    """w as a row, or as a scalar."""
    return Shape((m.w.elements,) if m.w.elements > 1 else ())


def _slice_before(m: Match) -> Slice:
    """The slice of x that a slice of the permuted x is."""
    axes = inverse(m.p).axes
    return Slice(tuple(m.s.begin[i] for i in axes), tuple(m.s.end[i] for i in axes))


def _slice_after(m: Match) -> Slice:
    return Slice(tuple(m.s.begin[axis] for axis in m.p.axes), tuple(m.s.end[axis] for axis in m.p.axes))


def _split_whole(m: Match) -> Shape:
    """All of x with its last dimension split in pieces."""
    piece = m.r.shape[-1]
    return Shape((*m.x.shape[:-1], m.x.shape[-1] // piece, piece))


def _slice_of_pieces(m: Match) -> Slice:
    piece = m.r.shape[-1]
    begin, end = (*m.s.begin[:-1], m.s.begin[-1] // piece, 0), (*m.s.end[:-1], m.s.end[-1] // piece, piece)
    return Slice(begin, end)


_MOVED = permute(x, "p")
_ONE_COPY = "one copy instead of two"
_TIDY = "nothing to do"
_MEET = "lets copies meet and cancel"

LAYOUT_RULES: tuple[Rule, ...] = (
    Rule(
        "permute-permute",
        permute(permute(x, "inner"), "outer"),
        permute(x, _composed),
        _ONE_COPY,
        source="TASO",
        on_weights=True,
    ),
    Rule("permute-identity", _MOVED, x, _TIDY, when=(keeps_order,), on_weights=True),
    Rule(
        "permute-as-reshape",
        before=_MOVED,
        after=reshape(x, lambda m: Shape(m.out[0].shape)),
        when=(moves_units_only,),
        worth=(changes_order,),
        on_weights=True,
        reason="a reshape copies nothing",
    ),
    Rule(
        "reshape-reshape",
        reshape(reshape(x, "inner"), "outer"),
        reshape(x, lambda m: Shape(m.outer.shape)),
        "only the last shape counts",
        on_weights=True,
    ),
    Rule("reshape-identity", reshape(x, "s"), x, _TIDY, when=(keeps_shape,), on_weights=True),
    Rule("broadcast-identity", broadcast(x, "s"), x, _TIDY, when=(keeps_shape,)),
    Rule("broadcast-broadcast", broadcast(broadcast(x, "inner"), "outer"), broadcast(x, "outer"), _ONE_COPY),
    Rule(
        "broadcast-left",
        binary(broadcast(x, "s"), y, "f"),
        binary(x, y, "f"),
        "the function broadcasts by itself",
        when=(broadcast_is_implied,),
    ),
    Rule(
        "broadcast-right",
        binary(y, broadcast(x, "s"), "f"),
        binary(y, x, "f"),
        "the function broadcasts by itself",
        when=(broadcast_is_implied,),
    ),
    *both_ways(
        "unary-after-permute",
        unary(_MOVED, "f"),
        "unary-before-permute",
        permute(unary(x, "f"), "p"),
        reason=_MEET,
        source="TASO",
    ),
    *both_ways(
        "unary-after-reshape",
        unary(reshape(x, "r"), "f"),
        "unary-before-reshape",
        reshape(unary(x, "f"), "r"),
        reason=_MEET,
    ),
    Rule(
        "binary-after-permutes",
        before=binary(_MOVED, permute(y, "p"), "f"),
        after=permute(binary(x, y, "f"), "p"),
        reason=_ONE_COPY,
        source="TASO",
    ),
    Rule(
        "binary-before-permute",
        before=permute(binary(x, y, "f"), "p"),
        after=binary(_MOVED, permute(y, "p"), "f"),
        when=(same_rank,),
        reason=_MEET,
        source="TASO",
    ),
    Rule(
        "binary-of-permute-and-weight",
        before=binary(_MOVED, w, "f"),
        after=permute(binary(x, permute(reshape(w, _full_rank), lambda m: inverse(m.p)), "f"), "p"),
        when=(does_not_enlarge,),
        worth=(several,),
        reason=_MEET,
    ),
    *both_ways(
        "binary-of-permute-and-number",
        binary(_MOVED, n, "f"),
        "permute-of-binary-with-number",
        permute(binary(x, n, "f"), "p"),
        when=(single,),
        reason=_MEET,
    ),
    *both_ways(
        "binary-after-reshapes",
        binary(reshape(x, "r"), reshape(y, "r"), "f"),
        "binary-before-reshape",
        reshape(binary(x, y, "f"), "r"),
        reason=_MEET,
        when=(same_shape,),
    ),
    *both_ways(
        "binary-of-reshape-and-row",
        binary(reshape(x, "r"), n, "f"),
        "reshape-of-binary-with-row",
        reshape(binary(x, n, "f"), "r"),
        when=(row_of_both,),
        reason=_MEET,
    ),
    Rule(
        "binary-with-row",
        before=binary(x, w, "f"),
        after=binary(x, reshape(w, _row), "f"),
        when=(is_row_with_units,),
        reason="one form of a bias, so that reshapes need not change it",
    ),
    Rule("slice-of-permute", slice_(_MOVED, "s"), permute(slice_(x, _slice_before), "p"), _MEET),
    Rule("permute-of-slice", permute(slice_(x, "s"), "p"), slice_(_MOVED, _slice_after), _MEET),
    Rule(
        "reshape-of-slice",
        before=reshape(slice_(x, "s"), "r"),
        after=slice_(reshape(x, _split_whole), _slice_of_pieces),
        when=(groups_stay_together,),
        reason="heads that were projected together are split once",
    ),
)
