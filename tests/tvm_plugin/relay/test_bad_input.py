"""Bad input gives one clear error with a position, in bounded time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eqtune import relay
from eqtune.errors import InputError, UnsupportedModelError
from eqtune.frontends import load_model
from eqtune.relay import RelayError, UnsupportedRelayError
from eqtune.relay.tokens import Tokens

HEADER = '#[version = "0.0.5"]\n'
GOOD = (
    HEADER + "def @main(%x: Tensor[(1, 3, 8, 8), float32], %w: Tensor[(4, 3, 3, 3), float32]) "
    "-> Tensor[(1, 4, 6, 6), float32] {\n  %0 = nn.conv2d(%x, %w, kernel_size=[3, 3]);\n  nn.relu(%0)\n}\n"
)
CROP = 'coordinate_transformation_mode="tf_crop_and_resize"'
SIZE = 'arange(3f, 5f, 1f, dtype="int32")'
PARTS = "split(%0, indices_or_sections=2, axis=1)"


def ends_of_tokens(text: str) -> list[int]:
    """Where the text can be cut so that no token is cut; the closing brace left out, every cut breaks the program."""
    tokens, ends = Tokens(text.rstrip().removesuffix("}")), [0]
    while tokens.current.kind != "end":
        token = tokens.advance()
        ends.append(token.position + len(token.text))
    return ends


# Cuts within the words, and after every token.
@pytest.mark.parametrize("end", sorted({*range(len(HEADER), len(GOOD) - 3, 7), *ends_of_tokens(GOOD)}))
def test_truncated_text_is_refused_at_a_position(end: int) -> None:
    with pytest.raises(RelayError) as caught:
        relay.from_text(GOOD[:end])
    assert caught.value.line is not None


@pytest.mark.parametrize("end", range(1, len(HEADER) - 1))
def test_a_truncated_version_line_is_refused(end: int) -> None:
    with pytest.raises(RelayError, match="line 1, column 1: "):
        relay.from_text(GOOD[:end])


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "message"),
    [
        ('"0.0.5"', '"0.0.4"', 1, 1, r"expected #\[version = \"0\.0\.5\"\]"),
        ("def @main", "define @main", 2, 1, "found 'define', expected def @NAME"),
        ("%0 = nn", "%1 = nn", 4, 11, "%0 is used before it is defined"),
        ("relu(%0)", "relu(%y)", 4, 11, "the variable %y is not defined here"),
        ("nn.relu", "nn.reloo", 4, 3, r"1 operator cannot be converted to Relax: nn\.reloo \(1 time"),
        ("kernel_size", "kernel", 3, 8, "nn.conv2d has no attribute 'kernel'; it has: strides"),
        ("[3, 3])", '"3")', 3, 8, "kernel_size of nn.conv2d is '3', expected a list of numbers"),
        ("[3, 3])", "[5, 3])", 3, 8, "kernel_size is \\[5, 3\\]"),
        ("[3, 3])", "[3, 3], kernel_size=[3])", 3, 46, "kernel_size is given twice"),
        ("%w, kernel", "kernel", 3, 8, "nn.conv2d takes 2 arguments, 1 are given"),
        ("(4, 3, 3, 3)", "(4, 5, 3, 3)", 3, 8, "nn.conv2d: "),
        ("(1, 4, 6, 6)", "(1, 4, 6, 7)", 2, 5, r"@main returns Tensor\[\(1, 4, 6, 6\), float32\], expected"),
        ("(4, 3, 3, 3), float32", "(4, 3, 3, 3), float33", 2, 71, "found 'float33', expected a dtype"),
        ("(4, 3, 3, 3)", "(4, 3, -3, 3)", 2, 64, "found '-', expected"),
        ("%w: Tensor[(4, 3, 3, 3), float32]", "%w", 2, 46, "the parameter %w needs a type"),
        ("%w: Tensor", "%x: float32, %w: Tensor", 2, 46, "%x is a parameter twice"),
        ("3]);", "3])", 4, 3, "found 'nn.relu', expected ;"),
        ("relu(%0)", "relu(%0.0)", 4, 13, ".0 of something that is no tuple"),
        ("relu(%0)", "relu((%0, %0).2)", 4, 19, r"\.2 of a tuple with 2 fields"),
        ("relu(%0)", "relu(99999999999999999999)", 4, 11, "no number that its type can hold"),
        ("relu(%0)", "relu(1f128)", 4, 11, "no number that its type can hold"),
        ("relu(%0)", 'relu("%0)', 4, 11, "this string is not closed"),
        ("relu(%0)", "relu(%0) /* /* */", 4, 15, "this comment is not closed"),
        ("relu(%0)", "relu(%0) $", 4, 15, "found '\\$', which starts nothing"),
        ("relu(%0)", "relu(meta[relay.Constant][0])", 4, 11, "print the module with its metadata"),
        ("nn.relu(%0)", "Some(%0) }\ntype Option[A] { Some(A), None, }\ndef @f() { Some(1)", 6, 12, "Some, a value"),
        ("%0)\n}", "%0)\n}\ndef @main() { 1 }", 6, 5, "@main is defined twice"),
        ("nn.relu(%0)", "@f(%0)", 2, 5, "@main calls @f, which is not defined"),
        ("nn.relu(%0)", "@main(%x, %w)", 2, 5, "recursion"),
        ("nn.relu(%0)", "%x(%0)", 4, 3, "what is called is no function"),
        ("nn.relu(%0)", "fn (%a, %b) { %a }(%0)", 4, 3, "the function takes 2 arguments, 1 are given"),
        ("nn.relu(%0)", "fn (%a: float32) { %a }(%0)", 4, 3, r"the argument %a is Tensor\[\(1, 4, 6, 6\), float32\]"),
        ("nn.relu(%0)", "fn (%a) { %a }", 4, 3, "a function as a value"),
        ("nn.relu(%0)", "let %y: float32 = %0; %y", 4, 7, "%y is bound to Tensor"),
        ("nn.relu(%0)", "if (%0) { %0 } else { %0 }", 4, 3, "the condition of if must be one bool"),
        ("nn.relu(%0)", "if (sum(%0) < 1f) { %0 } else { %x }", 4, 3, "the branches of if have different types"),
        ("nn.relu(%0)", "ref(%0)", 4, 3, "a reference cell has no counterpart in Relax"),
        ("nn.relu(%0)", "match (%0) { _ => %0 }", 4, 3, "pattern matching has no counterpart in Relax"),
        ("def @main", "type List[A] { Nil, ", 6, 1, "found the end of the text, expected } at the end of the type"),
        ("nn.relu(%0)", "reshape(%0, newshape=[5, -1])", 4, 3, "cannot be applied to the shape"),
        ("nn.relu(%0)", "split(%0, indices_or_sections=5)", 4, 3, "into 5 equal parts"),
        ("nn.relu(%0)", f"image.resize2d(%0, size=[3, 3], roi=[0f, 1f], {CROP})", 4, 3, "expected the start"),
        ("nn.relu(%0)", f"dyn.image.resize2d(%0, {SIZE}, %0, {CROP})", 4, 3, "roi is computed when the program runs"),
        ("nn.relu(%0)", f"image.resize1d(sum(%0, axis=[1]), size=[3], {CROP})", 4, 3, "cannot compile it for an image"),
        ("nn.relu(%0)", "take(%0, squeeze(argmax(%0, axis=[1])), axis=1, batch_dims=1)", 4, 3, "differ in the first 1"),
        ("nn.relu(%0)", "add(%0, 1)", 4, 3, "add: "),
        ("nn.relu(%0)", "free_var %z: float32; %z", 4, 3, "%z is a free variable"),
        ("nn.relu(%0)", "reshape((%0, %0), newshape=[8])", 4, 3, "reshape: a tensor is expected, found a tuple"),
        ("nn.relu(%0)", f'cast({PARTS}, dtype="int8")', 4, 3, "cast: a tensor is expected, found a tuple"),
        ("nn.relu(%0)", f"if ({PARTS}) {{ %0 }} else {{ %0 }}", 4, 3, "the condition of if must be one bool"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_where_it_is(old: str, new: str, line: int, column: int, message: str) -> None:
    text = GOOD.replace(old, new, 1)
    with pytest.raises(RelayError, match=message) as caught:
        relay.from_text(text)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_all_missing_operators_are_listed_with_how_often_they_occur() -> None:
    body = "%0 = vision.nms(%x); %1 = foo.bar(%0); %2 = vision.nms(%1); exp(%2)"
    with pytest.raises(UnsupportedRelayError, match=r"2 operators .*: vision\.nms \(2 times, .* foo\.bar \(1 time"):
        relay.from_text(f"{HEADER}def @main(%x: float32) {{ {body} }}")


def test_dynamic_shapes_are_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedModelError, match=r'give the extents: shapes=\{"x": \(1, \.\.\.\)\}'):
        relay.from_text(f"{HEADER}def @main(%x: Tensor[(?, 3), float32]) {{ exp(%x) }}")
    with pytest.raises(RelayError, match="which the shape \\(1, 4\\) does not fit"):
        relay.from_text(f"{HEADER}def @main(%x: Tensor[(?, 3), float32]) {{ exp(%x) }}", shapes={"x": (1, 4)})


def test_parameters_that_do_not_fit_are_refused() -> None:
    w = np.zeros((4, 3, 3, 3), "float32")
    with pytest.raises(RelayError, match=r"params has for %w Tensor\[\(3, 3, 3\), float32\], expected"):
        relay.from_text(GOOD, {"w": w[0]})
    with pytest.raises(RelayError, match="params has none of main's parameters, which are: x, w; it has: weight"):
        relay.from_text(GOOD, {"weight": w})
    with pytest.raises(RelayError, match="params has 'weight', which main does not take; did you mean 'w'"):
        relay.from_text(GOOD, {"weight": w, "x": np.zeros((1, 3, 8, 8), "float32")})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "the metadata section is not JSON"),
        ("[]", 'has no list of "nodes"'),
        ('{"root": 9, "nodes": []}', "refers to node 9"),
        ('{"root": 0, "nodes": [{"type_key": "Map", "keys": [], "data": []}]}', "has 0 relay.Constant"),
        (
            '{"root": 0, "nodes": [{"type_key": "Map", "keys": ["relay.Constant"], "data": [1]}, {"type_key": "Array",'
            ' "data": [2]}, {"type_key": "relay.Constant", "attrs": {"data": "3"}}], "b64ndarrays": []}',
            "there is no array 3 among 0",
        ),
        (
            '{"root": 0, "nodes": [{"type_key": "Map", "keys": ["relay.Constant"], "data": [1]}, {"type_key": "Array",'
            ' "data": [2]}, {"type_key": "relay.Constant", "attrs": {"data": "0"}}], "b64ndarrays": ["P6G0lvBAXt0="]}',
            "it is truncated",
        ),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_broken_metadata_section_is_refused(metadata: str, message: str) -> None:
    text = f"{HEADER}def @main(%x: float32) {{ add(%x, meta[relay.Constant][0]) }}\n#[metadata]\n{metadata}"
    with pytest.raises(RelayError, match=message):
        relay.from_text(text)


DEEP = {
    "parentheses": "def @main(%x: float32) { " + "(" * 10_000 + "%x" + ")" * 10_000 + " }",
    "calls": "def @main(%x: float32) { " + "exp(" * 10_000 + "%x" + ")" * 10_000 + " }",
    "functions": "def @main(%x: float32) { " + "fn () { " * 10_000 + "%x" + "}" * 10_000 + " }",
    "branches": "def @main(%x: float32) { " + "if (True) { " * 10_000 + "%x" + "} else { %x }" * 10_000 + " }",
    "blocks": "def @main(%x: float32) { " + "{" * 10_000 + "%x" + "}" * 10_000 + " }",
    "types": "def @main(%x: " + "(" * 10_000 + "float32" + ",)" * 10_000 + ") { %x }",
    "attributes": "def @main(%x: float32) { reshape(%x, newshape=" + "[" * 10_000 + "]" * 10_000 + ") }",
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_nesting_is_refused_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned, scan = [], Tokens._scan
    monkeypatch.setattr(Tokens, "_scan", lambda tokens: scanned.append(scan(tokens)) or scanned[-1])
    with pytest.raises(RelayError, match="nested more than 64 levels deep") as caught:
        relay.from_text(HEADER + DEEP[kind])
    assert caught.value.line == 2
    assert len(scanned) < 1000, "it was read on"


def test_long_chains_are_no_nesting() -> None:
    chain = "".join(f"%{i + 1} = exp(%{i});\n" for i in range(3000))
    lets = "".join(f"let %y{i + 1} = tanh(%y{i});\n" for i in range(3000))
    negations = "-" * 20_000
    text = (
        f"{HEADER}def @main(%x: float32) {{ %0 = abs(%x);\n{chain} let %y0 = %3000;\n{lets} %y3000 * {negations}1f }}"
    )
    mod = relay.from_text(text)
    assert len(mod["main"].body.blocks[0].bindings) == 6003


def bomb(link: str, last: str) -> str:
    """Forty definitions, each of which uses the one before it twice."""
    functions = ["def @f0(%x: float32, %c: bool) { exp(%x) }"]
    functions += [f"def @f{i}(%x: float32, %c: bool) {{ {link.format(i - 1)} }}" for i in range(1, 40)]
    return HEADER + "\n".join(functions) + f"\ndef @main(%x: float32, %c: bool) {{ {last} }}"


@pytest.mark.parametrize(
    "text",
    [
        bomb("@f{0}(@f{0}(%x, %c), %c)", "@f39(%x, %c)"),
        HEADER
        + "def @main(%x: float32) { %0 = (%x, %x); "
        + "".join(f"%{i + 1} = (%{i}, %{i}); " for i in range(60))
        + "%60 }",
        HEADER
        + "def @main(%x: float32, %c: bool) { %0 = exp(%x); "
        + "".join(f"%{i + 1} = if (%c) {{ %{i} }} else {{ %{i} }}; " for i in range(40))
        + "%40 }",
    ],
    ids=["calls", "tuples", "branches"],
)
def test_a_small_text_that_asks_for_exponentially_much_is_refused(text: str) -> None:
    started = time.process_time()
    with pytest.raises(RelayError, match="more than"):
        relay.from_text(text)
    assert time.process_time() - started < 60


def test_a_file_of_more_than_eight_megabytes_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.relay"
    path.write_text(HEADER + "x" * 2**23)
    monkeypatch.setattr(Tokens, "_scan", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(InputError, match="8,388,608 are allowed"):
        load_model(path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.relay"
    path.write_bytes(bytes(range(128, 256)))
    with pytest.raises(InputError, match="is no text"):
        load_model(path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: relay.from_text(GOOD.encode()), "takes the text of a program, not bytes"),
        (lambda: relay.from_json(b"{}"), "takes text, not bytes"),
        (lambda: relay.from_json('{"root_index": 0, "nodes": []}'), "of TVM 0.20 or newer, which had no Relay"),
        (lambda: relay.from_text(GOOD, b"params"), "params must be a dict by the names of parameters, not bytes"),
        (lambda: relay.load_params("model.params"), r"takes the bytes of a .params file, not str: open\(path, 'rb'\)"),
        (lambda: relay.astext(GOOD), "prints an IRModule, not str"),
    ],
)
def test_arguments_that_were_mixed_up_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RelayError, match=message):
        call()
