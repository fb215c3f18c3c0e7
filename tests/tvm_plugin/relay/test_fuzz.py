"""A fixed number of damaged and generated programs: each is converted, or refused with RelayError; nothing else."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqtune import relay
from eqtune.relay import RelayError
from eqtune.relay.parser import parse

PROGRAM = """#[version = "0.0.5"]
def @f(%a: Tensor[(2, 3), float32]) -> (Tensor[(2, 3), float32], int32) { (nn.relu(%a), -3) }
def @main(%x: Tensor[(2, 3), float32], %c: bool, Primitive=1) -> Tensor[(2, 6), float32] {
  let %y: Tensor[(2, 3), float32] = add(%x, 1e-05f) * 2f; // comment
  %0 = fn (%p: Tensor[(2, 3), float32]) { %p };
  %1 = @f(%y); /* another */
  %2 = if (%c) { %1.0 } else { reshape(%x, newshape=[2, -1]) };
  %3 = (%2, meta[relay.Constant][0]);
  concatenate(%3, axis=1)
}
#[metadata]
{"root": 1, "nodes": [{"type_key": ""}, {"type_key": "Map", "keys": ["relay.Constant"], "data": [2]},
{"type_key": "Array", "data": [3]}, {"type_key": "relay.Constant", "attrs": {"data": "0"}}],
"b64ndarrays": ["P6G0lvBAXt0AAAAAAAAAAAEAAAAAAAAAAQAAAAIgAQACAAAAAAAAAAgAAAAAAAAAAACAPwAAAEA="]}
"""

WORDS = """fn let if else True False None meta[relay.Constant][0] %x %0 %1.0 @main nn.relu add split Tensor float32
int32 ( ) { } [ ] , ; : = -> + - * / < > == 1 2.5f 1e39f 3i64 99999999999 "s" /* */ // #[metadata] ? _ .0 axis= def"""
PIECES = st.sampled_from(sorted(set(WORDS.split())))


def survives(text: str) -> None:
    with contextlib.suppress(RelayError), np.errstate(all="ignore"):
        relay.from_text(text)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(PROGRAM)), st.integers(0, 12), PIECES), min_size=1, max_size=4))
def test_a_damaged_program_is_converted_or_refused(edits: list[tuple[int, int, str]]) -> None:
    text = PROGRAM
    for at, removed, inserted in edits:
        text = text[:at] + inserted + text[at + removed :]
    survives(text)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(PIECES, max_size=40))
def test_a_sequence_of_tokens_is_converted_or_refused(pieces: list[str]) -> None:
    survives('#[version = "0.0.5"]\ndef @main(%x: Tensor[(2, 3), float32]) { ' + " ".join(pieces) + " }")


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(RelayError):
        parse(text)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 120))
def test_damaged_parameters_are_read_or_refused(noise: bytes, at: int) -> None:
    import tvm

    data = bytes(tvm.runtime.save_param_dict({"w": tvm.runtime.tensor(np.ones((2, 3), "float32"))}))
    with contextlib.suppress(RelayError):
        relay.load_params(data[:at] + noise)
    with contextlib.suppress(RelayError):
        relay.load_params(data[:at] + noise + data[at + len(noise) :])
