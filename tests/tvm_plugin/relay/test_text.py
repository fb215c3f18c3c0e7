"""Each construct of the text format, in programs written by hand.

The format: "Language Reference, Relay Core IR" and "Relay expressions" of TVM's documentation up to 0.19, and the
programs in its tests (tests/python/relay/test_ir_parser.py, test_ir_text_printer.py), whose constructs are met here one
by one. What programs in the wild have besides (type definitions that nothing uses, a comment as the last argument,
splits into one part) was found in models/*.relay of github.com/gussmith23/glenside and in the documentation of TVM's
contributed backends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax

from eqtune import relay

HEADER = '#[version = "0.0.5"]\n'


def run(text: str, *inputs: NDArray[Any] | float, params: dict[str, NDArray[Any]] | None = None) -> Any:
    mod = relay.from_text(HEADER + text, params)
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(np.asarray(value, "float32")) for value in inputs))
    return [part.numpy() for part in result] if not isinstance(result, tvm.runtime.Tensor) else result.numpy()


def operators(text: str) -> list[str]:
    """The operators of "main", in order."""
    bindings = relay.from_text(HEADER + text)["main"].body.blocks[0].bindings
    return [b.value.op.name.removeprefix("relax.") for b in bindings if isinstance(b.value, relax.Call)]


X = np.array([-1.5, 0.5, 2.0], "float32")


def test_let_and_graph_variables_may_be_mixed() -> None:
    text = """def @main(%x: Tensor[(3), float32]) -> Tensor[(3,), float32] {
      let %y: Tensor[(3), float32] = nn.relu(%x);
      %0 = add(%y, %y);
      let %z = multiply(%0, 3f);
      %1 = subtract(%z, %0);
      %1
    }"""
    np.testing.assert_allclose(run(text, X), np.maximum(X, 0) * 4)


def test_a_graph_variable_is_shared_and_an_unused_one_disappears() -> None:
    text = "def @main(%x: float32) { %0 = exp(%x); %1 = tanh(%x); %2 = add(%0, %0); %2 }"
    assert operators(text) == ["exp", "add"]


def test_the_order_of_the_text_is_kept() -> None:
    text = "def @main(%x: float32) { %0 = exp(%x); %1 = tanh(%x); %2 = cos(%0); %3 = sin(%1); add(%3, %2) }"
    assert operators(text) == ["exp", "tanh", "cos", "sin", "add"]


def test_graph_variables_may_be_defined_anew_in_each_function() -> None:
    text = """def @f(%x: float32) { %0 = exp(%x); %0 }
    def @main(%x: float32) { %0 = tanh(%x); @f(%0) }"""
    assert operators(text) == ["tanh", "exp"]


def test_tuples_nest_and_are_projected() -> None:
    text = """def @main(%x: float32, %t: (float32, (float32,))) -> (float32, (float32, float32)) {
      %0 = (%x, (%t.0, %t.1.0));
      %1 = ((), %0, 2f,);
      (%1.1.1.1, (%1.0, %0.0).1, %1.2).0 + 0f;
      (%1.1.0, %0.1)
    }"""
    mod = relay.from_text(HEADER + text)
    assert str(mod["main"].ret_ty).count("float32") == 3


def test_infix_operators_bind_as_in_arithmetic_and_to_the_left() -> None:
    assert run("def @main(%x: float32) { (8f - %x - 1f) / 2f * -3f + 1f }", 3.0) == pytest.approx(-5)
    assert run("def @main(%x: float32) { where(%x + 1f > 2f * 1.5f, 1f, 0f) }", 3.0) == 1


@pytest.mark.parametrize(
    ("literal", "value", "dtype"),
    [
        ("3", 3, "int32"),
        ("-3", -3, "int32"),
        ("3000000000", 3_000_000_000, "int64"),
        ("7i64", 7, "int64"),
        ("7i16", 7, "int16"),
        ("1f", 1, "float32"),
        ("1e-05f", 1e-5, "float32"),
        ("-2.5e+3f", -2500, "float32"),
        ("0.5f64", 0.5, "float64"),
        ("0.5f16", 0.5, "float16"),
        ("inff", np.inf, "float32"),
        ("-inff", -np.inf, "float32"),
        ("nanf", np.nan, "float32"),
        ("--2f", 2, "float32"),
        ("True", True, "bool"),
    ],
)
def test_a_literal_has_the_value_and_type_of_its_suffix(literal: str, value: Any, dtype: str) -> None:
    main = relay.from_text(f"{HEADER}def @main() {{ {literal} }}")["main"]
    constant = main.body.blocks[0].bindings[0].value
    assert str(constant.ty.dtype) == dtype
    np.testing.assert_array_equal(np.from_dlpack(constant.value), np.asarray(value, dtype))


def test_comments_nest_and_annotations_in_them_are_skipped() -> None:
    text = """// the first line
    def @main(%x: float32 /* ty=float32 span=a.py:3:1 */) /* a /* nested */ one */ {
      nn.relu(%x) // trailing
    }"""
    assert operators(text) == ["nn.relu"]


def test_attributes_of_every_kind_reach_the_operator() -> None:
    text = """def @main(%x: Tensor[(1, 8, 8, 4), float32], %w: Tensor[(3, 3, 4, 2), float32]) {
      nn.conv2d(%x, %w, strides=[2, 2], padding=[1, 1, 1, 1], groups=1, channels=None, kernel_size=[3, 3],
        data_layout="NHWC", kernel_layout="HWIO", out_dtype="float32")
    }"""
    mod = relay.from_text(HEADER + text)
    attrs = mod["main"].body.blocks[0].bindings[0].value.attrs
    assert [int(x) for x in attrs.strides] == [2, 2]
    assert (attrs.data_layout, attrs.kernel_layout) == ("NHWC", "HWIO")


def test_a_double_attribute_keeps_more_digits_than_float32() -> None:
    mod = relay.from_text(
        f"{HEADER}def @main(%x: Tensor[(1, 2), float32], %v: Tensor[(2), float32]) "
        "{ nn.layer_norm(%x, %v, %v, epsilon=1e-12f) }"
    )
    assert mod["main"].body.blocks[0].bindings[0].value.attrs.epsilon == 1e-12


def test_fused_and_global_functions_are_inlined() -> None:
    text = """def @scale(%v: Tensor[(3), float32], %by: float32) -> Tensor[(3), float32] { multiply(%v, %by) }
    def @main(%x: Tensor[(3), float32]) {
      %2 = fn (%p0: Tensor[(3), float32], Primitive=1, hash="6f2c", kernel_layout="OIHW") -> Tensor[(3), float32] {
        %0 = add(%p0, 1f);
        nn.relu(%0)
      };
      %3 = %2(%x);
      let %double = fn (%v) { @scale(%v, 2f) };
      %double(%2(%3))
    }"""
    np.testing.assert_allclose(run(text, X), 2 * np.maximum(np.maximum(X + 1, 0) + 1, 0))
    assert [var.name_hint for var in relay.from_text(HEADER + text).get_global_vars()] == ["main"]


def test_a_function_without_def_is_main_as_function_astext_prints_it() -> None:
    assert operators("fn (%x: float32) -> float32 {\n  exp(%x)\n}") == ["exp"]


def test_if_takes_the_branch_at_run_time() -> None:
    text = """def @main(%x: Tensor[(3), float32], %limit: float32) -> Tensor[(3), float32] {
      %0 = sum(%x);
      if (less(%0, %limit)) { let %y = exp(%x); %y } else { %1 = negative(%x); add(%1, %0) }
    }"""
    np.testing.assert_allclose(run(text, X, 10.0), np.exp(X), rtol=1e-6)
    np.testing.assert_allclose(run(text, X, 0.0), -X + X.sum(), rtol=1e-6)


def test_a_condition_that_is_known_leaves_no_branch() -> None:
    assert operators("def @main(%x: float32) { if (True) { exp(%x) } else { tanh(%x) } }") == ["exp"]


def test_names_of_pytorch_have_dots_and_colons() -> None:
    params = "%input.1: float32, %aten::add_0.weight: float32, %t: (float32,)"
    text = f"def @main({params}) {{ %input.1 + %aten::add_0.weight + %t.0 }}"
    mod = relay.from_text(HEADER + text, {"aten::add_0.weight": np.float32(2)})
    assert [param.name for param in mod["main"].params] == ["input.1", "t"]


def test_a_parameter_may_say_where_it_lives() -> None:
    params = "%x {virtual_device_=meta[VirtualDevice][0]}: float32, virtual_device_=meta[VirtualDevice][1]"
    assert operators(f"def @main({params}) {{ exp(%x) }}") == ["exp"]


def test_constants_come_from_the_metadata_section() -> None:
    text = HEADER + (
        "def @main(%x: Tensor[(2), float32]) { add(%x, meta[relay.Constant][1]) }\n#[metadata]\n"
        '{"root": 1, "nodes": [{"type_key": ""}, {"type_key": "Map", "keys": ["relay.Constant"], "data": [2]},'
        '{"type_key": "Array", "data": [3, 4]},'
        '{"type_key": "relay.Constant", "attrs": {"_checked_type_": "0", "data": "1", "span": "0"}},'
        '{"type_key": "relay.Constant", "attrs": {"_checked_type_": "0", "data": "0", "span": "0"}}],'
        '"b64ndarrays": ["P6G0lvBAXt0AAAAAAAAAAAEAAAAAAAAAAQAAAAIgAQACAAAAAAAAAAgAAAAAAAAAAACAPwAAAEA=", "broken"],'
        '"attrs": {"tvm_version": "0.14.0"}}'
    )
    constant = relay.from_text(text)["main"].body.blocks[0].bindings[0].value.args[1]
    np.testing.assert_array_equal(np.from_dlpack(constant.value), np.array([1, 2], "float32"))


def test_parameters_become_constants_and_extents_are_filled_in() -> None:
    text = f"{HEADER}def @main(%x: Tensor[(?, 3), float32], %w: Tensor[(4, 3), float32]) {{ nn.dense(%x, %w) }}"
    mod = relay.from_text(text, {"w": np.ones((4, 3), "float32"), "unused": np.ones(7)}, {"x": (2, 3)})
    assert [param.name for param in mod["main"].params] == ["x"]
    assert [int(extent) for extent in mod["main"].ret_ty.shape] == [2, 4]
    assert int(mod["main"].attrs["num_input"]) == 1


def test_a_dtype_without_bits_has_32() -> None:
    mod = relay.from_text(HEADER + "def @main(%a: int, %b: Tensor[(2), float]) { (%a, %b) }")
    assert [str(param.ty.dtype) for param in mod["main"].params] == ["int32", "float32"]


def test_every_function_that_no_other_calls_is_converted() -> None:
    text = (
        f"{HEADER}def @a(%x: float32) {{ exp(%x) }} def @b(%x: float32) {{ @c(%x) }} def @c(%x: float32) {{ tanh(%x) }}"
    )
    assert {var.name_hint for var in relay.from_text(text).get_global_vars()} == {"a", "b"}


def test_print_leaves_out_the_version_line() -> None:
    main = relay.from_text("def @main(%x: float32) { exp(%x) }")["main"]
    assert [param.name for param in main.params] == ["x"]


def test_an_expression_with_free_variables_is_a_function_of_them() -> None:
    text = """free_var %x: Tensor[(2, 3), float32] /* ty=Tensor[(2, 3), float32] */;
    %0 = exp(%x);
    free_var %y: Tensor[(2, 3), float32];
    add(%0, %y)"""
    for version in (HEADER, ""):
        main = relay.from_text(version + text)["main"]
        assert [param.name for param in main.params] == ["x", "y"]


def test_types_that_nothing_uses_are_skipped() -> None:
    text = """type List[A] {
      Cons(A, List[A]),
      Nil,
    }
    extern type Storage
    type Either[A, B] { Left(A), Right(B) }
    def @main(%x: float32) { exp(%x) }
    type tensor_t { tensor0(Tensor[(?), float32]), }"""
    assert operators(text) == ["exp"]


def test_an_extent_may_be_a_variable_of_the_metadata() -> None:
    text = HEADER + (
        "def @main(%x: Tensor[(meta[tir.SizeVar][0], 3i64), float32]) { exp(%x) }\n#[metadata]\n"
        '{"root": 1, "nodes": [{"type_key": ""}, {"type_key": "Map", "keys": ["tir.SizeVar"], "data": [2]},'
        '{"type_key": "Array", "data": [3]},'
        '{"type_key": "tir.SizeVar", "attrs": {"dtype": "int32", "name": "4", "span": "0", "type_annotation": "0"}},'
        '{"type_key": "runtime.String", "repr_str": "n"}], "b64ndarrays": []}'
    )
    assert [int(extent) for extent in relay.from_text(text, shapes={"x": (5, 3)})["main"].ret_ty.shape] == [5, 3]


@pytest.mark.parametrize("bound", ["1e+300", "3.4028234663852886e+38", "0.1"])
def test_doubles_keep_their_digits_with_either_sign(bound: str) -> None:
    main = relay.from_text(f"{HEADER}def @main(%x: float32) {{ clip(%x, a_min=-{bound}f, a_max={bound}f) }}")["main"]
    _, least, most = main.body.blocks[0].bindings[0].value.args
    assert (float(least.value), float(most.value)) == (-float(bound), float(bound))


def test_spans_and_comments_stand_wherever_the_printer_puts_them() -> None:
    text = """def @main(%data.1: Tensor[(1, 3), float32] /* ty=Tensor[(1, 3), float32] span=aten::linear_0.data:0:0 */,
        output_tensor_names=["out"]) -> Tensor[(1, 3), float32] {
      %0 = nn.relu(%data.1, /* en_id=420 */) /* ty=Tensor[(1, 3), float32] span=aten::relu_0:0:0 */;
      add(%0, -1f /* ty=float32 span=const:0:0 */) /* ty=Tensor[(1, 3), float32] */
    } /* ty=fn (Tensor[(1, 3), float32]) -> Tensor[(1, 3), float32] */
    /* For debugging purposes the metadata section has been omitted. */"""
    assert operators(text) == ["nn.relu", "add"]


def test_what_an_operator_gives_and_nobody_reads_disappears() -> None:
    assert operators("def @main(%x: Tensor[(3), float32]) { %0 = nn.dropout(%x, rate=0.5f); exp(%0.0) }") == ["exp"]


def test_a_split_into_one_part_is_a_tuple_of_one() -> None:
    text = "def @main(%x: Tensor[(3), float32]) { %0 = split(%x, indices_or_sections=1); exp(%0.0) }"
    assert operators(text) == ["exp"]
