"""Models that choose boxes, as detectors exported with NonMaxSuppression do: as many as they find, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

import eqtune
from eqtune.cli import main
from eqtune.compile.untuned import untuned_executable
from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model
from eqtune.frontends.verify import is_settled, undecided
from eqtune.machine import detect_target
from eqtune.relax_ir.kernels import is_symbolic
from eqtune.runtime import LocalModels, ModelRunner
from eqtune.tune.chosen_inputs import FACTORS, inputs_that_choose
from eqtune.tune.forms import model_forms

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIDE, CLASSES, CELLS = 32, 3, 64
Arrays = list[NDArray[Any]]


class Graph:
    """An ONNX graph that grows node by node; constants are arrays among the inputs."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        results = [f"{name.lower()}{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(onnx.helper.make_node(name, names, results, **attributes))
        return results[0] if outputs == 1 else results

    def constant(self, value: Any) -> str:
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(value), f"constant{len(self.constants)}"))
        return str(self.constants[-1].name)

    def model(self, outputs: list[str], batch: int | str = 1) -> Any:
        graph = onnx.helper.make_graph(
            self.nodes,
            "detector",
            [onnx.helper.make_tensor_value_info("x", 1, [batch, 3, SIDE, SIDE])],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            self.constants,
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


Tail = Callable[[Graph, str, str, str], list[str]]
"""Boxes [1, cells, 4], scores [1, classes, cells] and what was chosen [chosen, 3] -> outputs."""


def detector(tail: Tail, least: float = 0.5, most: int = 8) -> Any:
    """Two convolutions, a head, boxes around cells by their middles and sizes, scores, and what `tail` makes of it."""
    random, graph = np.random.default_rng(0), Graph()
    x, channels = "x", 3
    for more in (8, 16):
        weights = random.standard_normal((more, channels, 3, 3)).astype("float32") / np.float32(3 * channels**0.5)
        x = graph("Relu", graph("Conv", x, weights, strides=[2, 2], pads=[1, 1, 1, 1]))
        channels = more
    head = random.standard_normal((4 + CLASSES, channels, 1, 1)).astype("float32")
    rows = graph("Reshape", graph("Conv", x, head), np.int64([1, 4 + CLASSES, CELLS]))
    places, scores = graph("Split", rows, np.int64([4, CLASSES]), outputs=2, axis=1)
    places = graph("Sigmoid", graph("Transpose", places, perm=[0, 2, 1]))
    cells = np.stack(np.meshgrid(np.arange(8), np.arange(8), [0], [0]), -1).reshape(1, CELLS, 4)
    boxes = graph("Add", graph("Mul", places, np.float32([4, 4, 8, 8])), np.float32(4) * cells.astype("float32"))
    scores = graph("Sigmoid", scores)
    limits = (np.int64([most]), np.float32([0.5]), np.float32([least]))
    chosen = graph("NonMaxSuppression", boxes, scores, *limits, center_point_box=1)
    return graph.model(tail(graph, boxes, scores, chosen))


def rows_of_all(graph: Graph, boxes: str, scores: str, chosen: str) -> list[str]:
    """A row for each box: where, how sure, and what, as exports of YOLO end."""
    places = graph("Gather", chosen, np.int64(2), axis=1)
    found = graph("Gather", graph("Squeeze", boxes, np.int64([0])), places)
    by_class = graph("Transpose", graph("Squeeze", scores, np.int64([0])), perm=[1, 0])
    scores = graph("Gather", by_class, places)
    best = graph("ReduceMax", scores, axes=[1])
    label = graph("Cast", graph("ArgMax", scores, axis=1), to=1)
    return [graph("Concat", found, best, label, axis=1)]


def boxes_scores_labels(graph: Graph, boxes: str, scores: str, chosen: str) -> list[str]:
    """Each as a tensor of its own, and the five best of all classes, as exports of torchvision end."""
    where = graph("Slice", chosen, np.int64([1]), np.int64([3]), np.int64([1]))
    best = graph("GatherND", graph("Squeeze", scores, np.int64([0])), where)
    count = graph("Concat", graph("Shape", best), np.int64([5]), axis=0)
    best, order = graph("TopK", best, graph("ReduceMin", count, axes=[0]), outputs=2, axis=0)
    chosen = graph("Gather", chosen, order)
    labels = graph("Add", graph("Gather", chosen, np.int64(1), axis=1), np.int64(1))
    places = graph("Gather", chosen, np.int64(2), axis=1)
    return [graph("Gather", graph("Squeeze", boxes, np.int64([0])), places), best, labels]


def first_of_images(graph: Graph, boxes: str, scores: str, chosen: str) -> list[str]:
    """Rows of as many zeros and images, the first three, and a head of its own for each box."""
    images, _, places = graph("Split", chosen, np.int64([1, 1, 1]), outputs=3, axis=1)
    found = graph("GatherND", boxes, graph("Concat", images, places, axis=1))
    zeros = graph("ConstantOfShape", graph("Concat", graph("Shape", images), axis=0))
    found = graph("Concat", found, zeros, graph("Cast", images, to=1), axis=1)
    weights = np.random.default_rng(1).standard_normal((6, 20)).astype("float32")
    inner = graph("Relu", graph("MatMul", found, weights))
    flat = graph("Reshape", inner, np.int64([-1, 4, 5]))
    return [graph("ReduceMean", flat, axes=[2]), graph("Slice", found, np.int64([0]), np.int64([3]), np.int64([0]))]


TAILS = [rows_of_all, boxes_scores_labels, first_of_images]


def image(seed: int, loud: float = 1.0) -> NDArray[Any]:
    noise = np.random.default_rng(seed).standard_normal((1, 3, SIDE, SIDE))
    return np.asarray(loud * noise, "float32")


def close(outputs: Arrays, expected: Arrays) -> None:
    assert [array.shape for array in outputs] == [array.shape for array in expected]
    for found, wanted in zip(outputs, expected, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def runner(model: Any, by_pipeline: bool) -> ModelRunner:
    """As the pipeline compiles it, or as the model is that tuned ones are measured against."""
    target = detect_target(2)
    if by_pipeline:
        return ModelRunner(tvm.compile(model.mod, target, relax_pipeline=relax.get_pipeline("eqtune", graph=False)))
    return ModelRunner(untuned_executable(model.mod, target, plain=True))


@pytest.mark.unoptimised
@pytest.mark.parametrize("by_pipeline", [True, False])
@pytest.mark.parametrize("tail", TAILS)
def test_as_many_rows_as_are_chosen_or_none(tail: Tail, by_pipeline: bool) -> None:
    model = load_model(detector(tail, least=0.9), any_size=True)
    assert model.reference is not None
    run, counts = runner(model, by_pipeline), []
    for x in (image(0), image(1), image(2, 4.0), 0 * image(0)):
        close(run(x), model.reference(x))
        counts.append(len(run(x)[0]))
    assert counts[-1] == 0 < min(counts[:-1])


@pytest.mark.unoptimised
@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize(("most", "overlap", "least"), [(4, 0.5, 0.3), (100, 0.0, 0.0), (100, 0.3, -0.2)])
def test_the_best_boxes_of_each_class_and_image(corners: bool, most: int, overlap: float, least: float) -> None:
    graph, random = Graph(), np.random.default_rng(0)
    places = random.uniform(0, 20, (2, 40, 4)).astype("float32")  # by corners, their sides may be turned around
    scores = np.round(random.uniform(-0.5, 1, (2, 3, 40)), 1).astype("float32")  # some are equal
    limits = (np.int64([most]), np.float32([overlap]), np.float32([least]))
    chosen = graph("NonMaxSuppression", "places", "scores", *limits, center_point_box=int(not corners))
    proto = graph.model([chosen])
    del proto.graph.input[:]
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, 1, x.shape) for name, x in (("places", places), ("scores", scores))
    )
    model = load_model(proto, any_size=True)
    assert model.reference is not None
    scores[0, 0] = np.round(np.abs(scores[0, 0]), 1)
    close(runner(model, True)(places, scores), model.reference(places, scores))


def test_as_many_boxes_as_the_model_knows_are_chosen_from() -> None:
    graph = Graph()
    chosen = graph("NonMaxSuppression", "places", "scores", np.int64([4]))
    proto = graph.model([chosen])
    del proto.graph.input[:]
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, 1, shape)
        for name, shape in (("places", [1, "count", 4]), ("scores", [1, 3, "count"]))
    )
    with pytest.raises(
        UnsupportedModelError, match="needs known numbers of images, classes and boxes, not count; give"
    ):
        load_model(proto, any_size=True)
    assert load_model(proto, shapes={"places": (1, 9, 4), "scores": (1, 3, 9)}, any_size=True).reference is not None


def test_what_is_in_front_of_a_choice_has_its_own_block_and_kernels_of_known_sizes() -> None:
    mod = load_model(detector(rows_of_all), any_size=True).mod
    front, size, _ = mod["main"].body.blocks
    assert isinstance(front, relax.DataflowBlock)
    assert not isinstance(size, relax.DataflowBlock)
    assert not any(relax.analysis.tir_vars_in_type(binding.var.ty) for binding in front.bindings)
    forms, found = model_forms(mod, detect_target(2), "saturate")
    assert found is not None
    assert any("conv2d" in task.name for task in forms.tasks)
    assert not any(is_symbolic(task.mod["main"]) for task in forms.tasks)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A detector in a file, and what tuning it gave."""
    folder = tmp_path_factory.mktemp("detector")
    onnx.save(detector(boxes_scores_labels), folder / "detector.onnx")
    arguments = {"time_budget_s": 0.1, "threads": 2, "graph": "off", "progress": False}
    with pytest.MonkeyPatch.context() as patch:  # the tuned model wins, whatever else the machine does
        patch.setattr(LocalModels, "time_s", lambda _, models, *given, **options: [2.0, *[1.0] * (len(models) - 1)])
        return folder, eqtune.tune_model(str(folder / "detector.onnx"), work_dir=folder / "work", **arguments)


def test_a_detector_is_tuned_and_compared_where_it_chooses(tuned: Any) -> None:
    folder, result = tuned
    assert result.max_rel_error <= 1e-4
    assert any(task.name.startswith("conv2d") for task in result.tasks)
    assert "compared with outputs of 5 x 4, 5, 5; kernels behind what the model chooses are" in str(result)
    model = load_model(folder / "detector.onnx", any_size=True)
    assert model.reference is not None
    for x in (image(0), image(1), 0 * image(0)):
        close(result.run(x), model.reference(x))


def test_a_tuned_detector_is_exported_and_reported(tuned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, result = tuned
    library = tvm.runtime.load_module(str(result.export(folder / "detector.so")))
    machine = relax.VirtualMachine(library, tvm.cpu())
    for x in (image(0), 0 * image(0)):
        outputs = [tensor.numpy() for tensor in machine["main"](tvm.runtime.tensor(x))]
        close(outputs, result.run(x))
    assert main(["report", str(folder / "work"), "-o", str(folder / "report.html")]) == 0
    capsys.readouterr()
    assert "compared with outputs of 5 x 4, 5, 5" in (folder / "report.html").read_text()


class Imported:
    """A model of noise, as far as inputs are made for it."""

    mod = None

    def random_inputs(self, seed: int) -> Arrays:
        return [np.random.default_rng(seed).standard_normal(4).astype("float32"), np.arange(seed, seed + 2)]


def above(least: float) -> Callable[..., Arrays]:
    return lambda x, _: [x[x > least], x]


def test_inputs_are_as_loud_as_it_takes_to_choose_something() -> None:
    imported: Any = Imported()
    (x, places), chooses = inputs_that_choose(imported, above(100.0), 3)
    assert chooses
    assert x.max() > 100 > np.abs(x).max() * FACTORS[0] / FACTORS[-1]
    assert places.tolist() in ([3, 4], [4, 5])  # numbers that count something stay
    (x, _), chooses = inputs_that_choose(imported, above(1e6), 3)
    assert not chooses
    np.testing.assert_array_equal(x, imported.random_inputs(3)[0])


def test_inputs_that_roundings_do_not_decide_about_come_first() -> None:
    imported: Any = Imported()
    first = imported.random_inputs(0)[0].max()
    (x, _), chooses = inputs_that_choose(imported, above(float(first) * (1 - 1e-7)), 0)
    assert chooses
    assert x.max() > 1.001 * first
    (x, _), chooses = inputs_that_choose(imported, lambda x, _: [x[: int(x.max() * 1e9) % 2 + 1]], 0)
    assert chooses  # none is better
    np.testing.assert_array_equal(x, imported.random_inputs(0)[0])


def test_a_choice_that_roundings_change_is_not_settled_and_nowhere_excused() -> None:
    x = np.float32([1, 2, 3])
    assert is_settled(above(1.5), [x, x], [x[1:], x], 1e-4)
    assert not is_settled(above(2.0), [x, x], [x[2:], x], 1e-4)
    assert not any(place.any() for place in undecided(above(2.0), [x, x], [x[2:], x], 1e-4))


def test_choices_whose_size_a_module_does_not_ask_for_are_refused(tmp_path: Path) -> None:
    boxes, scores = (relax.Var(name, relax.TensorType((1, 3, 4), "float32")) for name in ("boxes", "scores"))
    limits = (relax.const(2, "int64"), relax.const(0.5, "float32"), relax.const(0.0, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [boxes, scores]):
        with builder.dataflow():
            chosen = builder.emit(op.vision.all_class_non_max_suppression(boxes, scores, *limits))
            result = builder.emit_output(relax.TupleGetItem(chosen, 0))
        builder.emit_func_output(result)
    with pytest.raises(UnsupportedModelError, match=r"non_max_suppression .* has a shape that depends on data"):
        load_model(builder.get(), any_size=True)
