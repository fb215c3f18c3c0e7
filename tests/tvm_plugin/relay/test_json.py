"""JSON as `tvm.ir.save_json` of TVM 0.8 to 0.19 wrote it, and parameter files.

The JSON is made from programs here by the rules of that function (`src/node/serialization.cc`): one node an object,
references by number, numbers as text, maps with the keys beside the values.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi

from eqtune import relay, zoo
from eqtune.cli import main
from eqtune.frontends import load_model
from eqtune.frontends.params import load_params
from eqtune.relay import RelayError, UnsupportedRelayError
from eqtune.relay import program as ir
from eqtune.relay.arrays import array_to_bytes
from eqtune.relay.attributes import attribute_class
from eqtune.relay.operators import OPERATORS
from eqtune.relay.parser import parse

HEADER = '#[version = "0.0.5"]\n'


class Saver:
    """What a TVM with Relay would have saved for a program."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = [{"type_key": ""}]
        self.blobs: list[str] = []
        self.seen: dict[int, int] = {}

    def node(self, type_key: str, **fields: Any) -> int:
        attrs = {name: str(value) for name, value in fields.items()}
        self.nodes.append({"type_key": type_key, **({"attrs": attrs} if attrs else {})})
        return len(self.nodes) - 1

    def array(self, items: list[int]) -> int:
        self.nodes.append({"type_key": "Array", **({"data": items} if items else {})})
        return len(self.nodes) - 1

    def string(self, text: str) -> int:
        self.nodes.append({"type_key": "runtime.String", "repr_str": text})
        return len(self.nodes) - 1

    def number(self, value: Any) -> int:
        if isinstance(value, list):
            return self.array([self.number(element) for element in value])
        if value is None:
            return 0
        kind = "FloatImm" if isinstance(value, float) else "IntImm"
        plain = int(value) if isinstance(value, bool) else value
        return self.node(kind, dtype="float32" if kind == "FloatImm" else "int32", span=0, value=plain)

    def type(self, ty: ir.Type | None) -> int:
        if isinstance(ty, ir.TensorType):
            return self.node("relay.TensorType", dtype=ty.dtype, shape=self.number(list(ty.shape)), span=0)
        if isinstance(ty, ir.TupleType):
            return self.node("TupleType", fields=self.array([self.type(part) for part in ty.fields]), span=0)
        return self.node("IncompleteType", kind=0, span=0) if ty is None else 0

    def attrs(self, operator: str, given: dict[str, Any]) -> int:
        name = OPERATORS[operator].attrs
        if not name:
            return 0
        fields = {}
        for field, attribute in (attribute_class(name) or {}).items():
            value = given.get(field, attribute.default)
            if attribute.kind in ("int", "double", "bool"):
                fields[field] = str(int(value) if attribute.kind == "bool" else value)
            elif attribute.kind == "DataType":
                fields[field] = value or ""
            elif attribute.kind == "string":  # tvm::String in some classes, std::string in others
                fields[field] = str(self.string(value)) if field.endswith("layout") else value
            else:
                fields[field] = str(self.number(value))
        return self.node(f"relay.attrs.{name}", **fields)

    def expr(self, node: ir.Expr) -> int:
        if id(node) not in self.seen:
            self.seen[id(node)] = self.make(node)
        return self.seen[id(node)]

    def exprs(self, nodes: list[Any]) -> int:
        return self.array([self.expr(node) for node in nodes])

    def make(self, node: ir.Expr) -> int:
        common = {"span": 0, "_checked_type_": 0, "virtual_device_": 0}
        if isinstance(node, ir.Var):
            vid = self.node("relay.Id", name_hint=self.string(node.name))
            return self.node("relay.Var", vid=vid, type_annotation=self.type(node.type), **common)
        if isinstance(node, ir.Constant):
            self.blobs.append(base64.b64encode(array_to_bytes(node.value)).decode())
            return self.node("relay.Constant", data=len(self.blobs) - 1, **common)
        if isinstance(node, ir.GlobalRef):
            return self.node("GlobalVar", name_hint=self.string(node.name), **common)
        if isinstance(node, ir.Tuple):
            return self.node("relay.Tuple", fields=self.exprs(node.fields), **common)
        if isinstance(node, ir.TupleItem):
            return self.node("relay.TupleGetItem", tuple_value=self.expr(node.value), index=node.index, **common)
        if isinstance(node, ir.If):
            parts = {
                "cond": self.expr(node.condition),
                "true_branch": self.expr(node.then),
                "false_branch": self.expr(node.otherwise),
            }
            return self.node("relay.If", **parts, **common)
        if isinstance(node, ir.Let):
            var, value, body = self.expr(node.var), self.expr(node.value), self.expr(node.body)
            return self.node("relay.Let", var=var, value=value, body=body, **common)
        if isinstance(node, ir.Function):
            fields = {"params": self.exprs(node.params), "body": self.expr(node.body)}
            return self.node("relay.Function", **fields, ret_type=self.type(node.result), attrs=0, **common)
        args = self.exprs(node.args)
        if isinstance(node.callee, str):
            self.nodes.append({"type_key": "Op", "repr_str": node.callee})
            op, attrs = len(self.nodes) - 1, self.attrs(node.callee, node.attrs)
        else:
            op, attrs = self.expr(node.callee), 0
        return self.node("relay.Call", op=op, args=args, attrs=attrs, type_args=0, **common)

    def save(self, program: ir.Program) -> str:
        pairs = []
        for name, function in program.functions.items():
            pairs += [self.expr(ir.GlobalRef(name)), self.expr(function)]
        self.nodes.append({"type_key": "Map", "data": pairs})
        root = self.node("IRModule", functions=len(self.nodes) - 1, source_map=0, attrs=0)
        data = {"root": root, "nodes": self.nodes, "b64ndarrays": self.blobs, "attrs": {"tvm_version": "0.14.0"}}
        return json.dumps(data)


PROGRAMS = {
    "graph": "def @main(%x: Tensor[(1, 3), float32]) { %0 = exp(%x); %1 = (%0, %0); add(%1.0, %1.1) * 2f }",
    "let": "def @main(%x: float32) { let %y: float32 = tanh(%x); let %z = exp(%y); %0 = add(%y, %z); %0 - 1f }",
    "function": """def @f(%x: float32, %t: (float32, bool)) -> float32 { where(%t.1, %t.0, %x) }
        def @main(%x: float32, %c: bool) { %0 = fn (%p) { nn.relu(%p) }; @f(%0(%x), (%x, %c)) }""",
    "if": "def @main(%x: float32) { if (%x < 1f) { %0 = exp(%x); %0 } else { tanh(%x) } }",
    "attributes": """def @main(%x: Tensor[(1, 8, 8, 4), float32], %w: Tensor[(3, 3, 4, 2), float32]) {
        %0 = nn.conv2d(%x, %w, strides=[2, 2], padding=[1, 1, 1, 1], channels=2, kernel_size=[3, 3],
          data_layout="NHWC", kernel_layout="HWIO");
        %1 = clip(%0, a_min=0f, a_max=6f);
        %2 = split(%1, indices_or_sections=[1, 3], axis=2);
        %3 = take(%2.1, 1i64, axis=2, mode="fast");
        %4 = cumsum(%3, axis=1, exclusive=True);
        %5 = nn.pad(%4, 0f, pad_width=[[0, 0], [1, 2], [0, 0]]);
        cast(argmax(%5, axis=[1], keepdims=True), dtype="int64")
      }""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_json_and_text_of_a_program_give_the_same_module(name: str) -> None:
    text = HEADER + PROGRAMS[name]
    saved = Saver().save(parse(text))
    assert tvm_ffi.structural_equal(relay.from_json(saved), relay.from_text(text), map_free_vars=True)


def test_a_whole_network_in_json_is_the_network(tmp_path: Path) -> None:
    mod = zoo.relax("squeezenet")
    path = tmp_path / "squeezenet.json"
    path.write_text(Saver().save(parse(relay.astext(mod))))
    loaded = load_model(path)
    assert loaded.name == "squeezenet"
    assert tvm_ffi.structural_equal(loaded.mod, load_model(mod).mod)


def test_the_kernels_of_a_saved_program_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "exp.json"
    path.write_text(Saver().save(parse(f"{HEADER}def @main(%x: Tensor[(16, 16), float32]) {{ exp(%x) }}")))
    assert main(["kernels", str(path), "--list", "--threads", "1"]) == 0
    assert capsys.readouterr().out.startswith("exp ")


def test_a_saved_function_becomes_main() -> None:
    saver = Saver()
    root = saver.expr(parse(f"{HEADER}def @f(%x: float32) {{ exp(%x) }}").functions["f"])
    mod = relay.from_json(json.dumps({"root": root, "nodes": saver.nodes}))
    assert [var.name_hint for var in mod.get_global_vars()] == ["main"]


def test_a_chain_of_thousands_of_nodes_needs_no_recursion() -> None:
    data = json.loads(Saver().save(parse(f"{HEADER}def @main(%x: float32) {{ exp(%x) }}")))
    nodes = data["nodes"]
    inner = next(i for i, node in enumerate(nodes) if node["type_key"] == "relay.Call")
    operator = nodes[inner]["attrs"]["op"]
    for _ in range(20_000):
        nodes.append({"type_key": "Array", "data": [inner]})
        nodes.append({"type_key": "relay.Call", "attrs": {"op": operator, "args": str(len(nodes) - 1)}})
        inner = len(nodes) - 1
    next(node for node in nodes if node["type_key"] == "relay.Function")["attrs"]["body"] = str(inner)
    mod = relay.from_json(json.dumps(data))
    assert len(mod["main"].body.blocks[0].bindings) == 20_002


def damaged(change: Any) -> str:
    data = json.loads(Saver().save(parse(HEADER + PROGRAMS["let"])))
    nodes = {node["type_key"]: node for node in data["nodes"]}
    change(data, nodes)
    return json.dumps(data)


def set_field(type_key: str, name: str, value: str) -> Any:
    return lambda data, nodes: nodes[type_key]["attrs"].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data, nodes: data.pop("nodes"), 'has no list of "nodes"'),
        (lambda data, nodes: data.update(root=10_000), "'root' refers to node 10000"),
        (lambda data, nodes: nodes["relay.Let"]["attrs"].pop("body"), "relay.Let has no field 'body'"),
        (set_field("relay.Let", "body", "-1"), "refers to node '-1'"),
        (lambda data, nodes: nodes["relay.Let"]["attrs"].update(var=nodes["relay.Let"]["attrs"]["value"]), "no var"),
        (set_field("relay.Function", "params", "0"), "is not bound here"),
        (lambda data, nodes: nodes["Op"].update(repr_str="foo"), "1 operator cannot be converted"),
        (set_field("relay.Constant", "data", "7"), "there is no array 7 among"),
        (lambda data, nodes: data.update(b64ndarrays=["%%%"] * 9), "not base64"),
        (lambda data, nodes: nodes["relay.TensorType"].update(type_key="relay.RefType"), "no counterpart in Relax"),
        (lambda data, nodes: nodes["relay.Let"].update(type_key="relay.Match"), "relay.Match has no counterpart"),
        (lambda data, nodes: nodes["relay.Let"].update(type_key="relay.Foo"), "where an expression is expected"),
        (lambda data, nodes: nodes["IRModule"].update(type_key="Array"), "Array is saved here"),
        (lambda data, nodes: nodes["Map"].update(data=[]), "the module has no functions"),
    ],
)
def test_damaged_json_is_refused_with_the_node(change: Any, message: str) -> None:
    with pytest.raises(RelayError, match=message):
        relay.from_json(damaged(change))


def test_a_cycle_is_refused() -> None:
    data = json.loads(Saver().save(parse(HEADER + PROGRAMS["graph"])))
    calls = [i for i, node in enumerate(data["nodes"]) if node["type_key"] == "relay.Call"]
    data["nodes"][int(data["nodes"][calls[0]]["attrs"]["args"])]["data"] = [calls[-1]]
    with pytest.raises(RelayError, match="contains itself"):
        relay.from_json(json.dumps(data))


def test_dynamic_shapes_in_json_are_refused() -> None:
    data = json.loads(Saver().save(parse(f"{HEADER}def @main(%x: Tensor[(7), float32]) {{ exp(%x) }}")))
    extent = next(node for node in data["nodes"] if node["type_key"] == "IntImm")
    extent["type_key"] = "tir.Any"
    with pytest.raises(UnsupportedRelayError, match=r"Tensor\[\(\?\), float32\], of dynamic shape"):
        relay.from_json(json.dumps(data))


WEIGHTS = {
    "conv1.weight": np.arange(6, dtype="float32").reshape(2, 3),
    "flag": np.array([True, False]),
    "scalar": np.array(3, "int64"),
    "empty": np.zeros((0, 3), "float16"),
    "quantized": np.array([-1, 2], "int8"),
}


def test_parameters_come_back_as_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.params"
    path.write_bytes(tvm.runtime.save_param_dict({name: tvm.runtime.tensor(w) for name, w in WEIGHTS.items()}))
    loaded = load_params(path)
    assert list(loaded) == list(WEIGHTS)
    for name, array in WEIGHTS.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.parametrize("end", [0, 7, 16, 24, 40, 60, 100, 120])
def test_truncated_parameters_are_refused(end: int) -> None:
    data = bytes(tvm.runtime.save_param_dict({"w": tvm.runtime.tensor(WEIGHTS["conv1.weight"])}))
    assert end < len(data)
    with pytest.raises(RelayError, match=r"truncated|not parameters"):
        relay.load_params(data[:end])


def split_of(attributes: str, extra: list[dict[str, Any]]) -> str:
    """A function that splits its parameter (6,), with `attributes` in place of the sections."""
    nodes: list[dict[str, Any]] = [
        {"type_key": ""},
        {"type_key": "relay.Function", "attrs": {"params": "2", "body": "7", "ret_type": "0", "attrs": "0"}},
        {"type_key": "Array", "data": [3]},
        {"type_key": "relay.Var", "attrs": {"vid": "4", "type_annotation": "5"}},
        {"type_key": "relay.Id", "attrs": {"name_hint": "8"}},
        {"type_key": "relay.TensorType", "attrs": {"dtype": "float32", "shape": "6"}},
        {"type_key": "Array", "data": [9]},
        {"type_key": "relay.Call", "attrs": {"op": "10", "args": "2", "attrs": "11", "type_args": "0"}},
        {"type_key": "runtime.String", "repr_str": "x"},
        {"type_key": "IntImm", "attrs": {"dtype": "int32", "value": "6"}},
        {"type_key": "Op", "repr_str": "split"},
        {"type_key": attributes, "attrs": {"axis": "0", "indices_or_sections": "12"}},
        *extra,
    ]
    return json.dumps({"root": 1, "nodes": nodes, "b64ndarrays": []})


@pytest.mark.parametrize(
    "sections",
    [
        [{"type_key": "IntImm", "attrs": {"dtype": "int32", "value": "2"}}],
        [{"type_key": "runtime.BoxInt", "repr_str": "2"}],
        [{"type_key": "Array", "data": [13]}, {"type_key": "runtime.BoxInt", "repr_str": "3"}],
    ],
)
def test_numbers_may_be_boxed_as_tvm_0_17_does(sections: list[dict[str, Any]]) -> None:
    mod = relay.from_json(split_of("relay.attrs.SplitAttrs", sections))
    assert [int(field.shape[0]) for field in mod["main"].ret_ty.fields] == [3, 3]


def test_attributes_of_a_class_that_is_not_known_are_refused() -> None:
    sections = [{"type_key": "runtime.BoxInt", "repr_str": "2"}]
    with pytest.raises(RelayError, match=r"class relay\.attrs\.Slices, expected SplitAttrs"):
        relay.from_json(split_of("relay.attrs.Slices", sections))
