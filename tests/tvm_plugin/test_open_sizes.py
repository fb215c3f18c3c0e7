"""Models whose sizes stay open, through `tune_model` and the command line: PyTorch, ONNX and Relax."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import eqtune
from eqtune import pipeline
from eqtune.cli import main
from eqtune.errors import InputError, MismatchError, UnsupportedModelError
from eqtune.frontends import load_model
from eqtune.machine import detect_target
from eqtune.pipeline import cheapest_form
from eqtune.records import RecordDatabase
from eqtune.relax_ir.tensors import STEPS
from eqtune.runtime import LocalModels
from eqtune.schedules.stored import stored_schedules
from eqtune.search.allocation.stopping import Stopping
from eqtune.symbolic import typical_sizes
from eqtune.tune import open_sizes
from eqtune.tune.result import TaskResult
from eqtune.tune.tiles import TunedTiles, _with_results

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

N = tirx.Var("n", "int64")
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


WEIGHTS = normal(32, 24)


def tuned(model: Any, work_dir: Path, **arguments: Any) -> Any:
    """With no time to measure anything, unless a test gives some."""
    arguments = {"graph": "off", "threads": 2, "progress": False, "time_budget_s": 0.1} | arguments
    return eqtune.tune_model(model, work_dir=work_dir, **arguments)


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def rows() -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((N, 32), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(op.matmul(x, relax.const(WEIGHTS)))
            result = builder.emit_output(op.nn.relu(product))
        builder.emit_func_output(result)
    return builder.get()


class Tokens(torch.nn.Module):
    """What language models do of open sizes: a part of a table of places, a mask made of places, the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, 32), torch.nn.Embedding(40, 32)
        self.inner = torch.nn.Linear(32, 96)
        self.register_buffer("order", torch.arange(40)[None])

    def forward(self, words: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = words.shape
        x = self.words(words) + self.places(self.order[:, :length])
        query, key, value = (
            part.reshape(batch, length, 2, 16).transpose(1, 2) for part in self.inner(x).split(32, dim=-1)
        )
        place = torch.arange(length)
        mask = (place[None, :] <= place[:, None])[None, None] & seen.bool()[:, None, None, :]
        y = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        return y[:, -1], (y * length).sum(-1) + torch.cumsum(seen, -1)


def words(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    seen = torch.ones(2, length, dtype=torch.int64)
    seen[-1, : length // 3] = 0
    return torch.randint(0, 50, (2, length), generator=generator), seen


@pytest.fixture(scope="module")
def tokens() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    module = Tokens().eval()
    shapes = ({1: torch.export.Dim("length", min=1, max=40)},) * 2
    return module, torch.export.export(module, words(12), dynamic_shapes=shapes)


def test_a_program_with_open_sizes_runs_at_any(tokens: Any, tmp_path: Path) -> None:
    module, program = tokens
    result = tuned(program, tmp_path)
    assert result.summary.open_sizes == "length=12"  # as the program calls it, and as in its example
    assert result.max_rel_error <= 1e-4
    assert "for any size, timed at" in str(result)
    assert not any(task.measured for task in result.tasks)
    for length in (1, 12, 40):
        given = words(length)
        with torch.no_grad():
            wanted = module(*given)
        for found, one in zip(result.run(*given), wanted, strict=True):
            close(found, one.numpy())


@pytest.mark.parametrize("wins", [True, False])
def test_tiles_are_measured_once(wins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run where the model is timed: of 100 rows 64, 32 and 4. Passes build the model that was faster."""
    mod, sizes = rows(), {"n": 100}
    runs_s = [3e-3, 2e-3, 1e-3 if wins else 2.5e-3]  # the baseline, by estimate, measured

    monkeypatch.setattr(LocalModels, "time_s", lambda _, models, *given, **options: runs_s[: len(models)])
    monkeypatch.setattr(Stopping, "reason", lambda _, status: status.finished)  # also at a busy machine's roofline
    result = tuned(mod, tmp_path, sizes=sizes, trials=24, time_budget_s=None)
    if wins:
        assert {task.name.split(", ")[1] for task in result.tasks} == {"tile of 64", "tile of 32", "tile of 4"}
        assert all(task.measured and task.trials for task in result.tasks)
        assert "not measured" not in str(result)
    else:
        assert result.summary.trials == 0
    assert result.summary.trials + result.summary.other_trials == 24
    for size in (1, 7, 100, 133):
        x = normal(size, 32)
        close(result.run(x)[0], np.maximum(x @ WEIGHTS, 0))
    again = tuned(mod, tmp_path, sizes=sizes, trials=24, time_budget_s=None)
    assert again.summary.trials + again.summary.other_trials == 24
    more = tuned(mod, tmp_path, sizes=sizes, trials=32, time_budget_s=None)
    assert 24 < more.summary.trials + more.summary.other_trials <= 32
    target = detect_target(threads=2)
    with target, RecordDatabase(tmp_path / "records.sqlite") as records:
        form = cheapest_form(mod, target, stored_schedules(records), graph=False)
        (tiles,) = form.tiled.tiles.values()
    if not wins:
        assert not form.decisions
        return
    measured = [tile for tile in tiles if tile.workload_hash in form.decisions]
    assert sorted(length for tile in measured for length in tile.tile.extents.values()) == [4, 32, 64]
    first = form.decisions[tiles[0].workload_hash]
    assert all(tile.shares == first for tile in tiles[1:])


@pytest.mark.alone
def test_the_budget_is_kept_with_open_sizes(tmp_path: Path) -> None:
    """With time for some trials, and compiling twice."""
    started = time.monotonic()
    result = tuned(rows(), tmp_path, time_budget_s=15.0)
    assert time.monotonic() - started < 20.0
    assert result.summary.trials + result.summary.other_trials > 0


def test_a_table_is_not_read_beyond_its_end(tmp_path: Path) -> None:
    """x + table[:n]: what ONNX Runtime refuses by the shapes that it meets."""
    result = tuned(rows_of_a_table(), tmp_path)
    assert result.summary.open_sizes == "n=8"
    x = normal(5, 4)
    close(result.run(x)[0], x + TABLE[:5])
    with pytest.raises(InputError, match="the size n is from 1 to 8, not 11"):
        result.run(np.zeros((11, 4), np.float32))


def test_inputs_agree_in_their_open_sizes(tmp_path: Path) -> None:
    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    n = torch.export.Dim("n", min=1, max=64)
    program = torch.export.export(Add(), (torch.randn(4, 6), torch.randn(4, 6)), dynamic_shapes=({0: n}, {0: n}))
    result = tuned(program, tmp_path)
    with pytest.raises(InputError, match="the size n is 3 in the input x and 5 in y"):
        result.run(normal(3, 6), normal(5, 6))


TABLE = np.arange(32, dtype=np.float32).reshape(8, 4)


def rows_of_a_table() -> Any:
    table = onnx.numpy_helper.from_array(TABLE, "table")
    return graph(
        [
            node("Shape", ["x"], "shape", end=1),
            node("Slice", ["table", "zero", "shape", "zero"], "part"),
            node("Add", ["x", "part"], "y"),
        ],
        {"x": ["n", 4]},
        {"y": ["n", 4]},
        [table, numbers("zero", [0])],
    )


def node(name: str, inputs: list[str], output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(name, inputs, [output], **attributes)


def numbers(name: str, values: Any) -> Any:
    return onnx.numpy_helper.from_array(np.array(values, np.int64), name)


def graph(nodes: list[Any], inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], constants: Any = ()) -> Any:
    tensors = [
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in side.items()]
        for side in (inputs, outputs)
    ]
    made = onnx.helper.make_graph(nodes, "open", *tensors, list(constants))
    return onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)


def heads() -> Any:
    """[batch, places, 24] with heads split and joined by computed shapes, as exporters write it."""
    weights = onnx.numpy_helper.from_array(normal(24, 24), "weights")
    return graph(
        [
            node("Shape", ["x"], "shape"),
            node("Gather", ["shape", "first"], "batch", axis=0),
            node("Gather", ["shape", "second"], "places", axis=0),
            node("Unsqueeze", ["batch", "axis"], "batch1"),
            node("Unsqueeze", ["places", "axis"], "places1"),
            node("Concat", ["batch1", "places1", "heads"], "split", axis=0),
            node("MatMul", ["x", "weights"], "product"),
            node("Reshape", ["product", "split"], "apart"),
            node("Transpose", ["apart"], "turned", perm=[0, 2, 1, 3]),
            node("Softmax", ["turned"], "soft", axis=-1),
            node("Transpose", ["soft"], "back", perm=[0, 2, 1, 3]),
            node("Concat", ["batch1", "places1", "rest"], "joined", axis=0),
            node("Reshape", ["back", "joined"], "y"),
        ],
        {"x": ["batch", "places", 24]},
        {"y": ["batch", "places", 24]},
        [
            weights,
            numbers("first", 0),
            numbers("second", 1),
            numbers("axis", [0]),
            numbers("heads", [3, 8]),
            numbers("rest", [-1]),
        ],
    )


def test_an_onnx_model_with_open_sizes_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "heads.onnx"
    onnx.save(heads(), path)
    arguments = ["--work-dir", str(tmp_path / "work"), "--threads", "1", "--graph", "off", "--quiet"]
    arguments += ["--budget", "0.1"]
    assert main(["tune", str(path), "--size", "places=5", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "for any size, timed at batch=1, places=5" in printed  # a batch is 1 unless somebody says otherwise
    assert "the kernel's tiles are scheduled by estimate" in printed
    assert main(["tune", str(path), "--size", "places", *arguments]) == 2
    assert "--size 'places': write it as NAME=128" in capsys.readouterr().err


def test_a_budget_that_compiling_takes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eqtune")
    tuned(rows(), tmp_path, time_budget_s=0.1)
    assert "no kernel is measured: compiling for any size took" in caplog.text
    caplog.clear()
    tuned(rows(), tmp_path / "trials", time_budget_s=None, trials=2)
    assert "no kernel is measured" not in caplog.text


def masked() -> Any:
    """A mask of lower triangles, by places that are compared, and a tensor that is expanded to a computed shape."""
    return graph(
        [
            node("Shape", ["x"], "shape"),
            node("Gather", ["shape", "zero"], "n", axis=0),
            node("Range", ["zero", "n", "one"], "places"),
            node("Unsqueeze", ["places", "axis"], "column"),
            node("Less", ["column", "places"], "later"),
            node("ConstantOfShape", ["rank"], "ones", value=numbers("", [1])),
            node("Mul", ["shape", "ones"], "same"),
            node("Equal", ["same", "minus"], "free"),
            node("Where", ["free", "ones", "same"], "wanted"),
            node("Expand", ["row", "wanted"], "wide"),
            node("Where", ["later", "none", "x"], "kept"),
            node("Max", ["kept", "wide"], "y"),
        ],
        {"x": ["n", "n"]},
        {"y": ["n", "n"]},
        [
            *(numbers("zero", 0), numbers("one", 1), numbers("axis", [1]), numbers("rank", [2])),
            numbers("minus", [-1]),
            *(onnx.numpy_helper.from_array(np.array(v, np.float32), k) for k, v in (("row", [[-0.5]]), ("none", 0))),
        ],
    )


def test_shapes_that_an_onnx_model_computes(tmp_path: Path) -> None:
    result = tuned(masked(), tmp_path)
    for size in (1, 7, 20):
        x = normal(size, size)
        close(result.run(x)[0], np.maximum(np.tril(x), -0.5).astype(np.float32))


class Sizes(torch.nn.Module):
    """Numbers that are computed of sizes, in shapes and beside tensors."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, m = x.shape[0], y.shape[0]
        pairs = x.reshape(n // 2 * 2 * 3, 2).sum(-1) / (n * m)
        both = torch.cat([x, y])
        wide = x[:, None].expand(n, m, 6) + y[None]
        grid = torch.full((n, m), 2.0) * torch.arange(m) + x.new_zeros(n, 1)
        return pairs, both[m:], wide.mean((0, 1)), grid, x.repeat(2, m), x[::2], torch.var(x, 0), both[n - 1]


@pytest.mark.parametrize(
    ("begin", "end", "step"),
    [
        *((0, 10, 1), (-5, 2**31 - 1, 1), (0, -5, 1), (3, 2**62, 1), (1, -1, 1), (1, 2**31 - 1, 3), (2, 6, 2)),
        *((-1, 1 - 2**63, -1), (2**62, -(2**62), -3), (5, 1, -2), (-2, 0, -1)),  # flips, among others
    ],
)
def test_slices_of_open_axes_end_where_they_end(tmp_path: Path, begin: int, end: int, step: int) -> None:
    constants = [numbers(k, [v]) for k, v in (("begin", begin), ("end", end), ("axis", 0), ("step", step))]
    part = node("Slice", ["x", "begin", "end", "axis", "step"], "y")
    result = tuned(graph([part], {"x": ["n", 3]}, {"y": [None, 3]}, constants), tmp_path, threads=1)
    for size in (1, 2, 4, 7, 20):
        x = normal(size, 3)
        close(result.run(x)[0], x[begin:end:step])


class Rolled(torch.nn.Module):
    """Shifts beyond the size, to both sides, by a size, along axes that are known, and of all elements in a row."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.roll((-8, 2, 4), (0, -1, 1)), x.roll(x.shape[0] // 2, 0), x.roll(5)


def test_axes_of_open_sizes_are_rolled(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim("n", min=1, max=64)},)
    result = tuned(torch.export.export(Rolled(), (torch.randn(6, 4, 5),), dynamic_shapes=shapes), tmp_path, threads=1)
    for size in (1, 2, 3, 7, 16):
        x = torch.randn(size, 4, 5)
        for found, wanted in zip(result.run(x), Rolled()(x), strict=True):
            close(found, wanted.numpy())


class Squeezed(torch.nn.Module):
    """Axes that are open, and none of one, stay."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = 2 * x
        return y.squeeze(0), y.squeeze(), y.squeeze((0, 1))


def test_axes_of_open_sizes_are_not_squeezed(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim("n", min=2, max=64)},)
    program = torch.export.export(Squeezed(), (torch.randn(6, 1, 5),), dynamic_shapes=shapes)
    result = tuned(program, tmp_path, threads=1)
    for size in (2, 7):
        x = torch.randn(size, 1, 5)
        for found, wanted in zip(result.run(x), Squeezed()(x), strict=True):
            close(found, wanted.numpy())


def computed(*steps: Any, **constants: Any) -> Any:
    """x, with "result", which is computed of the number "n" of its rows, added."""
    nodes = [node("Shape", ["x"], "n", end=1), *steps]
    nodes += [node("Cast", ["result"], "added", to=onnx.TensorProto.FLOAT), node("Add", ["x", "added"], "y")]
    return graph(nodes, {"x": ["n", 1]}, {"y": ["n", 1]}, [numbers(name, value) for name, value in constants.items()])


@pytest.mark.parametrize(
    ("steps", "value"),
    [
        ([node("Sub", ["n", "five"], "m"), node("Div", ["m", "two"], "result")], lambda n: int((n - 5) / 2)),
        ([node("Sub", ["n", "five"], "m"), node("Mod", ["m", "two"], "result", fmod=1)], lambda n: np.fmod(n - 5, 2)),
        ([node("Sub", ["n", "five"], "m"), node("Mod", ["m", "two"], "result")], lambda n: (n - 5) % 2),
        (
            [
                node("Sub", ["n", "two"], "m"),
                node("Equal", ["m", "zero"], "e"),
                node("Where", ["e", "five", "n"], "result"),
            ],
            lambda n: 5 if n == 2 else n,
        ),
        ([node("Gather", ["n", "zero"], "m"), node("Max", ["m", "five"], "result")], lambda n: max(n, 5)),
        (
            [
                node("Max", ["n", "two", "five"], "m"),
                node("Min", ["m", "eight", "n"], "k"),
                node("Max", ["k"], "result"),
            ],
            lambda n: min(n, 8),
        ),
    ],
)
def test_numbers_of_sizes_that_are_negative_or_zero(tmp_path: Path, steps: list[Any], value: Any) -> None:
    result = tuned(computed(*steps, zero=[0], two=[2], five=[5], eight=[8]), tmp_path, threads=1)
    for size in (1, 2, 5, 8, 11):
        x = normal(size, 1)
        close(result.run(x)[0], x + np.float32(value(size)))


def test_what_is_no_size_stays_what_it_is(tmp_path: Path) -> None:
    """Constants of other dtypes beside open sizes."""
    order = onnx.numpy_helper.from_array(np.array([5, 6, 7], np.int32), "order")
    nodes = [
        node("Gather", ["order", "places"], "rows"),
        node("Cast", ["rows"], "numbers", to=onnx.TensorProto.FLOAT),
        node("Add", ["x", "numbers"], "y"),
    ]
    model = graph(nodes, {"x": ["n", 2]}, {"y": ["n", 2]}, [order, numbers("places", [2, 0])])
    x = normal(3, 2)
    close(tuned(model, tmp_path, threads=1).run(x)[0], x + np.float32([7, 5]))


class Fractions(torch.nn.Module):
    """Fractions and tensors that are computed of sizes, places that count from the end, pixels that are repeated."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[2]
        made = x[..., :2] * torch.tensor([n, 2])
        return x / n**0.5 + n / 4, x[:, :, -(n // 2) :], torch.nn.functional.interpolate(x, scale_factor=2.0), made


def test_fractions_of_sizes(tmp_path: Path) -> None:
    module = Fractions()
    shapes = {"x": {2: torch.export.Dim.AUTO}}
    result = tuned(torch.export.export(module, (torch.randn(1, 2, 6, 4),), dynamic_shapes=shapes), tmp_path, threads=1)
    for size in (4, 7, 12):
        x = torch.randn(1, 2, size, 4)
        for found, wanted in zip(result.run(x), module(x), strict=True):
            close(found, wanted.numpy())


def test_sixteen_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.LayerNorm(24)).half().eval()
    shapes = ({0: torch.export.Dim("n", min=1, max=64)},)
    result = tuned(torch.export.export(module, (torch.randn(4, 16).half(),), dynamic_shapes=shapes), tmp_path)
    x = torch.randn(7, 16).half()
    np.testing.assert_allclose(result.run(x.numpy())[0], module(x).detach().numpy(), atol=2e-2)


@pytest.mark.parametrize("height", [2, 3])
def test_images_of_any_size(tmp_path: Path, height: int) -> None:
    """Windows of padded images, with strides, in groups; few pixels, and more than a tile."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1, stride=2, groups=4),
        torch.nn.MaxPool2d(3, 1, 1),
        torch.nn.Conv2d(32, 5, 1),
    ).eval()
    pixels = {axis: 2 * torch.export.Dim(f"size{axis}", min=1, max=64) for axis in (2, height)}
    x = torch.randn(1, 3, 8, 12)
    result = tuned(torch.export.export(module, (x,), dynamic_shapes=(pixels,)), tmp_path)
    for rows, columns in ((2, 2), (6, 10), (18, 38)):
        x = torch.randn(1, 3, rows, columns if height == 3 else 12)
        close(result.run(x)[0], module(x).detach().numpy())


class Resized(torch.nn.Module):
    """An image at a quarter of the size, at that of another one, and twice as large."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.first, self.second = (torch.nn.Conv2d(channels, 8, 3, padding=1, stride=2) for channels in (3, 8))
        self.twice = torch.nn.Upsample(scale_factor=2, **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = self.first(x)
        quarter = self.second(half)
        joined = half + torch.nn.functional.interpolate(quarter, size=half.shape[2:], **self.options)
        return joined, self.twice(joined)


@pytest.mark.parametrize(
    "options",
    [{"mode": "nearest"}, *({"mode": "bilinear", "align_corners": corners} for corners in (False, True))],
    ids=["nearest", "linear", "corners"],
)
def test_images_resized_to_open_sizes(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Resized(**options).eval()
    pixels = {axis: torch.export.Dim(f"size{axis}", min=16, max=128) for axis in (2, 3)}
    program = torch.export.export(module, (torch.randn(1, 3, 32, 40),), dynamic_shapes=(pixels,))
    result = tuned(program, tmp_path)
    for size in ((16, 16), (23, 37), (61, 18), (100, 103)):
        x = torch.randn(1, 3, *size)
        for found, wanted in zip(result.run(x), module(x), strict=True):
            close(found, wanted.detach().numpy())


@pytest.mark.parametrize(
    "resized", [{"scale_factor": 1.5, "mode": "bilinear"}, {"scale_factor": 2.0, "mode": "bicubic"}]
)
def test_what_images_of_open_sizes_are_not_resized_by(tmp_path: Path, resized: dict[str, Any]) -> None:
    module = torch.nn.Upsample(**resized)
    pixels = {axis: torch.export.Dim(f"size{axis}", min=16, max=128) for axis in (2, 3)}
    program = torch.export.export(module, (torch.randn(1, 3, 32, 40),), dynamic_shapes=(pixels,))
    with pytest.raises(UnsupportedModelError, match=r"resizes images of open sizes by .*shapes="):
        tuned(program, tmp_path)


@pytest.mark.parametrize(
    ("mode", "place", "rounding"),
    [
        ("nearest", "asymmetric", "floor"),
        ("nearest", "align_corners", "round_prefer_ceil"),
        ("nearest", "pytorch_half_pixel", "ceil"),
        ("linear", "half_pixel", "floor"),
        ("linear", "asymmetric", "floor"),
        ("linear", "pytorch_half_pixel", "floor"),
    ],
)
def test_an_onnx_image_resized_to_the_size_of_another(tmp_path: Path, mode: str, place: str, rounding: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    options = {"mode": mode, "coordinate_transformation_mode": place, "nearest_mode": rounding}
    nodes = [
        onnx.helper.make_node("Shape", ["y"], ["size"], start=2),
        onnx.helper.make_node("Concat", ["first", "size"], ["sizes"], axis=0),
        onnx.helper.make_node("Resize", ["x", "", "", "sizes"], ["z"], **options),
    ]
    first = onnx.numpy_helper.from_array(np.array([1, 3]), "first")
    inputs = [("x", [1, 3, "h", "w"]), ("y", [1, 1, "p", "q"])]
    graph = onnx.helper.make_graph(
        nodes,
        "resized",
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in inputs],
        [onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [1, 3, "p", "q"])],
        [first],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    result = tuned(model, tmp_path)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for before, after in (((5, 7), (1, 16)), ((9, 4), (9, 31)), ((40, 30), (13, 50)), ((1, 1), (3, 2))):
        x, y = normal(1, 3, *before), np.zeros((1, 1, *after), np.float32)
        close(result.run(x, y)[0], session.run(None, {"x": x, "y": y})[0])


def test_a_part_of_an_onnx_image_of_any_size_is_not_resized() -> None:
    """It would be all of it, or a corner: the input that tells the part is not read."""
    part = onnx.numpy_helper.from_array(np.float32([0, 0, 0.2, 0.2, 1, 1, 0.8, 0.8]), "part")
    factors = onnx.numpy_helper.from_array(np.float32([1, 1, 2, 2]), "factors")
    options = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    resize = node("Resize", ["x", "part", "factors"], "y", **options)
    model = graph([resize], {"x": [1, 3, "h", "w"]}, {"y": [1, 3, None, None]}, [part, factors])
    with pytest.raises(UnsupportedModelError, match=r"a Resize of open sizes .*tf_crop_and_resize"):
        load_model(model, any_size=True)


def test_what_programs_compute_of_sizes(tmp_path: Path) -> None:
    even = 2 * torch.export.Dim("half", min=1, max=32)
    shapes = {"x": {0: even}, "y": {0: torch.export.Dim("m", min=2, max=64)}}
    module = Sizes()
    program = torch.export.export(module, (torch.randn(4, 6), torch.randn(3, 6)), dynamic_shapes=shapes)
    result = tuned(program, tmp_path, threads=1)
    for n, m in ((4, 3), (2, 2), (10, 7)):
        x, y = torch.randn(n, 6), torch.randn(m, 6)
        for found, wanted in zip(result.run(x, y), module(x, y), strict=True):
            close(found, wanted.numpy())
    with pytest.raises(InputError, match=r"the size of_\w+ is a multiple of 2, from 2 to 64, not 5"):
        result.run(normal(5, 6), normal(3, 6))


class PairsAfterFirst(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1] + x[1:].reshape(-1, 12).sum(0).reshape(2, 6).sum(0)


def test_one_more_than_a_multiple(tmp_path: Path) -> None:
    odd = {0: 2 * torch.export.Dim("pairs", min=1, max=20) + 1}
    program = torch.export.export(PairsAfterFirst(), (torch.randn(7, 6),), dynamic_shapes=(odd,))
    result = tuned(program, tmp_path)
    (size,) = (pair.split("=")[0] for pair in result.summary.open_sizes.split(", "))
    for n in (3, 41):
        x = torch.randn(n, 6)
        close(result.run(x)[0], PairsAfterFirst()(x).numpy())
    message = f"the size {size} is 1 more than a multiple of 2, from 3 to 41, not "
    for n in (1, 6, 43):
        with pytest.raises(InputError, match=f"{message}{n}"):
            result.run(normal(n, 6))
        with pytest.raises(InputError, match=f"{message}{n}"):
            tuned(program, tmp_path, sizes={size: n})


def test_other_sizes_that_are_compared_are_allowed_ones() -> None:
    third = tvm.ir.IRModule({"main": rows()["main"].with_attr(STEPS, {"n": [3, 1]})})
    upper = third["main"].with_attr("tir_var_lower_bound", {"n": 2}).with_attr("tir_var_upper_bound", {"n": 30})
    for function, expected in ((third["main"], [16, 19, 31]), (upper, [16, 19, 28])):
        imported = load_model(tvm.ir.IRModule({"main": function}), any_size=True)
        sizes = open_sizes.typical_sizes(imported, None)
        assert [size["n"] for size in (sizes, *open_sizes._others(imported, sizes))] == expected


def test_a_library_refuses_sizes_that_it_was_not_made_for(tmp_path: Path) -> None:
    """It read a table past its end, and left out the last of five rows."""
    library = tuned(rows_of_a_table(), tmp_path / "table").export(tmp_path / "table.so")
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    x = normal(8, 4)
    close(machine["main"](tvm.runtime.tensor(x)).numpy(), x + TABLE)
    with pytest.raises(RuntimeError, match=r"11 vs\. 8"):
        machine["main"](tvm.runtime.tensor(np.zeros((11, 4), np.float32)))
    halves = torch.export.export(Halves(), (torch.randn(4, 6),), dynamic_shapes=({0: 2 * torch.export.Dim("half")},))
    machine = relax.VirtualMachine(tuned(halves, tmp_path / "halves").compile(), tvm.cpu())
    x = normal(6, 6)
    close(machine["main"](tvm.runtime.tensor(x)).numpy(), x[:3] + x[3:])
    with pytest.raises(RuntimeError, match=r"5 vs\. 4"):
        machine["main"](tvm.runtime.tensor(normal(5, 6)))


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1, 6).sum(0)


class Masked(torch.nn.Module):
    """Some rows of a known number are filled, of a batch that is open."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.arange(x.shape[1])[None, :, None] > 3, -1.0)


def test_a_mask_that_is_known_of_a_batch_that_is_not(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    result = tuned(torch.export.export(Masked(), (torch.randn(4, 6, 8),), dynamic_shapes=shapes), tmp_path)
    for batch in (1, 5):
        x = torch.randn(batch, 6, 8)
        close(result.run(x)[0], Masked()(x).numpy())


def test_images_of_any_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    )
    for tensor in (layers[1].weight, layers[1].bias, layers[1].running_mean, layers[1].running_var):
        torch.nn.init.uniform_(tensor, 0.5, 1.5)
    module = torch.nn.Sequential(layers, torch.nn.Flatten(), torch.nn.Linear(8 * 8 * 8, 5)).eval()
    program = torch.export.export(
        module, (torch.randn(2, 3, 16, 16),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},)
    )
    result = tuned(program, tmp_path, graph="saturate")
    for batch in (1, 3):
        x = torch.randn(batch, 3, 16, 16)
        close(result.run(x)[0], module(x).detach().numpy())


def test_memory_serves_other_sizes(tmp_path: Path) -> None:
    """TVM's virtual machine keeps what it allocates by its size in bytes: few sizes of memory serve all."""
    x = relax.Var("x", relax.TensorType((N, 1000), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            sums = builder.emit(op.cumsum(x, axis=0))
            result = builder.emit_output(op.sum(builder.emit(op.cumsum(sums, axis=1)), axis=[0]))
        builder.emit_func_output(result)
    run = tuned(builder.get(), tmp_path, threads=1).run

    def kept() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    run(np.ones((400, 1000), np.float32))
    before = kept()
    for size in range(1, 400):
        run(np.ones((size, 1000), np.float32))
    assert kept() - before < 100e6  # two of each size would be 640 MB


def test_a_relax_module_is_timed_where_its_user_says(tmp_path: Path) -> None:
    mod = rows()
    result = tuned(mod, tmp_path, sizes={"n": 30})
    assert result.summary.open_sizes == "n=30"
    assert {task.calls for task in result.tasks} == {1}
    library = result.export(tmp_path / "rows.so")
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    x = normal(70, 32)
    close(machine["main"](tvm.runtime.tensor(x)).numpy(), result.run(x)[0])
    fixed = tuned(mod, tmp_path, shapes={"x": (5, 32)}, trials=1, time_budget_s=None)
    assert not fixed.summary.open_sizes
    assert fixed.mod["main"].params[0].ty.shape.values[0] == 5


def test_a_model_without_kernels(tmp_path: Path) -> None:
    x = relax.Var("x", relax.TensorType((N, 32), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(op.reshape(x, (N * 4, 8)))
        builder.emit_func_output(result)
    given = normal(3, 32)
    close(tuned(builder.get(), tmp_path, graph="saturate").run(given)[0], given.reshape(12, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": {"m": 3}}, "no open size 'm'; its open sizes are: n"),
        ({"sizes": {"n": 0}}, "the size n is at least 1, not 0"),
        ({"sizes": {"n": "8"}}, "the size n is a whole number, not '8'"),
        ({"sizes": [8]}, r"sizes are a mapping of names to whole numbers, .* not \[8\]"),
        (
            {"shapes": {"x": (4, 32)}, "sizes": {"n": 4}},
            r"no open size 'n'; its open sizes are: none \(shapes that are given",
        ),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tuned(rows(), tmp_path, **arguments)


def test_typical_sizes_of_images() -> None:
    n, h, w = (tirx.Var(name, "int64") for name in ("batch", "h", "w"))
    builder = relax.BlockBuilder()
    image = relax.Var("image", relax.TensorType((n, 3, h, w), "float32"))
    with builder.function("main", [image]):
        builder.emit_func_output(builder.emit(op.nn.relu(image)))
    mod = builder.get()
    imported = load_model(mod, any_size=True)
    assert open_sizes.typical_sizes(imported, None) == {"batch": 1, "h": 224, "w": 224}
    assert open_sizes.typical_sizes(imported, {"h": 480}) == {"batch": 1, "h": 480, "w": 224}
    assert open_sizes.typical_sizes(load_model(rows(), any_size=True), None) == {"n": 16}
    assert typical_sizes(mod) == {"h": 224, "w": 224}
    bounded = mod["main"].with_attr("tir_var_upper_bound", {"h": 96}).with_attr("tir_var_lower_bound", {"h": 2})
    assert typical_sizes(tvm.IRModule({"main": bounded})) == {"h": 96, "w": 224}


def test_sizes_beyond_what_a_program_allows(tokens: Any, tmp_path: Path) -> None:
    _, program = tokens
    with pytest.raises(InputError, match="the size length is from 1 to 40, not 50"):
        tuned(program, tmp_path, sizes={"length": 50})


def test_open_sizes_are_for_cpus(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"input 'x' has the dynamic dimension 0 \(n\)"):
        tuned(rows(), tmp_path, target="nvidia/nvidia-h100", measure="compile-only")


def test_a_model_that_computes_something_else_at_another_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right where it is timed, wrong with one row more."""
    from eqtune.tune import open_sizes

    def wrong_at_17(compute: Callable[..., Any]) -> Callable[..., Any]:
        def errors(self: Any, run: Any) -> tuple[float, float]:
            absolute, relative = compute(self, run)
            return absolute, relative + (self.reference.inputs[0].shape[0] == 17)

        return errors

    monkeypatch.setattr(open_sizes.Accuracy, "errors", wrong_at_17(open_sizes.Accuracy.errors))
    with pytest.raises(MismatchError, match="at n=17, the tuned model's outputs differ"):
        tuned(rows(), tmp_path)


def test_sizes_that_are_equal_are_compared_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are 16 unless somebody says otherwise: one in the place of the other did not show."""
    x = relax.Var("x", relax.TensorType((N, tirx.Var("m", "int64")), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(op.nn.relu(x))
        builder.emit_func_output(result)
    compute = open_sizes.Accuracy.errors

    def wrong_unless_square(self: Any, run: Any) -> tuple[float, float]:
        absolute, relative = compute(self, run)
        rows, columns = self.reference.inputs[0].shape
        return absolute, relative + (rows != columns)

    monkeypatch.setattr(open_sizes.Accuracy, "errors", wrong_unless_square)
    with pytest.raises(MismatchError, match="at n=17, m=18, the tuned model's outputs differ"):
        tuned(builder.get(), tmp_path)


@pytest.mark.parametrize(("trials", "schedule"), [(0, "by estimate"), (1, "plain")])
def test_a_kernel_that_was_not_measured_keeps_its_schedule_by_estimate(trials: int, schedule: str) -> None:
    """It got the plain one, which is there for kernels that nothing makes faster."""
    nothing: Any = None
    form = pipeline.EstimatedForm("exact", nothing, nothing, nothing, {"a": "by estimate"}, {}, 1, 1, 1.0)
    found = TaskResult("kernel", "a", 1, 1.0, 1.0, 1e-3, 1e-3, trials=trials, failed=0, trace="plain")
    assert _with_results(TunedTiles(form, {}), [found], interrupted=False).form.schedules == {"a": schedule}
