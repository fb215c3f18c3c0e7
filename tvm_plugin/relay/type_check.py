"""Relay types beside Relax types."""

from __future__ import annotations

from typing import Any

from tvm import relax

from . import program as ir

__all__ = ["fits", "is_static", "relax_type", "relay_type"]


def is_static(annotation: ir.Type | None) -> bool:
    """Whether a type is a tensor, or a tuple of tensors, of known extents."""
    if isinstance(annotation, ir.TupleType):
        return all(is_static(part) for part in annotation.fields)
    return isinstance(annotation, ir.TensorType) and None not in annotation.shape


def relax_type(annotation: ir.Type | None) -> Any:
    """The Relax type of a static Relay type."""
    if isinstance(annotation, ir.TupleType):
        return relax.TupleType([relax_type(part) for part in annotation.fields])
    assert isinstance(annotation, ir.TensorType)  # is_static
    return relax.TensorType(annotation.shape, annotation.dtype)


def relay_type(value: Any) -> ir.Type:
    """The type of a converted value."""
    if isinstance(value, list):
        return ir.TupleType(tuple(relay_type(part) for part in value))
    return _from_relax(value.ty)


def _from_relax(ty: Any) -> ir.Type:
    if isinstance(ty, relax.TupleType):
        return ir.TupleType(tuple(_from_relax(part) for part in ty.fields))
    return ir.TensorType(tuple(int(extent) for extent in ty.shape), str(ty.dtype))


def fits(found: ir.Type, annotation: ir.Type | None) -> bool:
    """Whether a value of the type `found` may stand where `annotation` is written; `?` and `_` take anything."""
    if annotation is None:
        return True
    if isinstance(found, ir.TupleType) and isinstance(annotation, ir.TupleType):
        return len(found.fields) == len(annotation.fields) and all(
            part is not None and fits(part, own) for part, own in zip(found.fields, annotation.fields, strict=True)
        )
    if not isinstance(found, ir.TensorType) or not isinstance(annotation, ir.TensorType):
        return False
    return (
        found.dtype == annotation.dtype
        and len(found.shape) == len(annotation.shape)
        and all(own in (None, extent) for extent, own in zip(found.shape, annotation.shape, strict=True))
    )
