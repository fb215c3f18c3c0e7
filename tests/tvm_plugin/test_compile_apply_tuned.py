"""Schedules reach the model, weights are packed before it runs, and the outputs stay the same."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.error import InternalError
from tvm.s_tir import Schedule

from eqtune.compile.executable import build_executable
from eqtune.compile.untuned import untuned_executable
from eqtune.dtypes import numpy_dtype
from eqtune.errors import InputError, RecordError
from eqtune.gpu_machine import resolve_target
from eqtune.records.traces import trace_to_json
from eqtune.relax_ir.constants import array_of, constant_of
from eqtune.relax_ir.functions import constants
from eqtune.runtime import ModelRunner
from eqtune.schedules import analytic, best
from eqtune.schedules.analytic import analytic_schedules
from eqtune.schedules.apply import apply_schedules
from eqtune.schedules.pack_weights import pack_weights
from eqtune.schedules.packing import pack
from eqtune.search.space import Hardware
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import ApplyTuned, FoldWeights, LowerToKernels
from eqtune.tune import tune_kernels

op = relax.op
TARGET = tvm.target.Target("llvm")
BOARD = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}


def constant(*shape):
    return relax.const(np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32"))


@pytest.fixture(scope="module")
def model():
    """Two linear layers of one kernel, one of another, with an element-wise kernel between them."""
    builder = relax.BlockBuilder()
    emit = builder.emit
    x = relax.Var("x", relax.TensorType((8, 96), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for _ in range(2):
                y = emit(op.nn.relu(emit(op.add(emit(op.matmul(y, constant(96, 96))), constant(96)))))
            y = emit(op.tanh(emit(op.permute_dims(y))))
            z = emit(op.matmul(emit(op.permute_dims(y)), constant(96, 100)))
            result = builder.emit_output(emit(op.reshape(z, (4, 200))))
        builder.emit_func_output(result)
    return builder.get()


@pytest.fixture(scope="module")
def kernels(model):
    return lower_to_kernels(model, TARGET)


def packed_matmul(mod):
    """Tiles of 4 x 32, the weight in panels of 32 columns, epilogue in the tile."""
    sch = Schedule(mod)
    block = sch.get_sblock("matmul")
    panels = sch.cache_read(block, 1, "global")
    sch.transform_layout(panels, ("write", 0), lambda k, n: (n // 32, k, n % 32), pad_value=0.0)
    sch.annotate(panels, "meta_schedule.layout_rewrite_preproc", True)
    i, j, k = sch.get_loops(block)
    io, ii = sch.split(i, [None, 4])
    jo, j0, j1 = sch.split(j, [None, 2, 16])
    sch.reorder(jo, io, k, ii, j0, j1)
    names = [sch.get(b).name_hint for b in sch.get_child_blocks(sch.get_sblock("root"))]
    if "T_add" in names:
        sch.compute_inline("T_add")
        sch.set_scope(block, 0, "local")
        sch.reverse_compute_at("compute", io)
    sch.vectorize(j1)
    sch.decompose_reduction(block, k)
    return sch


def fused_loops(mod):
    sch = Schedule(mod)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    for block in blocks[:-1]:
        sch.compute_inline(block)
    sch.parallel(sch.fuse(*sch.get_loops(blocks[-1])))
    return sch


@pytest.fixture(scope="module")
def schedules(kernels):
    """By workload hash, as the text of a trace."""
    found = {}
    for task in extract_tasks(kernels):
        schedule = packed_matmul if "matmul" in task.name else fused_loops
        found[task.workload_hash] = trace_to_json(schedule(task.mod).trace)
    return found


def calls(mod):
    """The kernels that a run calls, with the types of their arguments."""
    found = []

    def visit(call):
        if isinstance(call.op, tvm.ir.Op) and call.op.name == "relax.call_tir":
            found.append((call.args[0].name_hint, [argument.ty for argument in call.args[1].fields]))

    relax.analysis.post_order_visit(mod["main"], lambda e: visit(e) if isinstance(e, relax.Call) else None)
    return found


def data():
    return np.random.default_rng(0).standard_normal((8, 96)).astype("float32")


def test_scheduled_model_computes_the_same(model, kernels, schedules):
    want = ModelRunner(untuned_executable(model, TARGET))(data())
    got = ModelRunner(build_executable(kernels, TARGET, schedules))(data())
    assert got[0].shape == (4, 200)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)


def test_nothing_is_packed_when_the_model_runs(kernels, schedules):
    before = [name for name, _ in calls(kernels)]
    tuned = ApplyTuned(schedules=schedules)(kernels)
    assert relax.analysis.check_well_formed(tuned)
    assert len(calls(tuned)) == len(before)
    weights = [types[1] for name, types in calls(tuned) if "matmul" in name]
    assert [tuple(int(e) for e in ty.shape) for ty in weights] == [(3, 96, 32), (3, 96, 32), (4, 96, 32)]
    scheduled = [f for f in tuned.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert all(f.attrs["tirx.is_scheduled"] for f in scheduled)
    assert not any("layout_rewrite_preproc" in f.script() for f in scheduled)


def test_kernels_without_a_schedule_stay_as_they_are(kernels, schedules):
    one = {key: value for key, value in list(schedules.items())[:1]}
    changed = apply_schedules(kernels, one)
    kept = [
        variable.name_hint
        for variable, function in kernels.functions_items()
        if isinstance(function, tirx.PrimFunc) and tvm_ffi.structural_equal(changed[variable.name_hint], function)
    ]
    assert len(kept) == len(schedules) - 1
    np.testing.assert_allclose(
        ModelRunner(build_executable(kernels, TARGET, one))(data())[0],
        ModelRunner(build_executable(kernels, TARGET))(data())[0],
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_schedule_may_be_a_function(kernels):
    task = next(task for task in extract_tasks(kernels) if "tanh" in task.name)
    changed = apply_schedules(kernels, {task.workload_hash: fused_loops})
    assert "T.parallel" in changed[task.name].script()


def test_a_trace_that_does_not_fit_is_refused(kernels, schedules):
    tasks = extract_tasks(kernels)
    tanh = next(task for task in tasks if "tanh" in task.name)
    matmul = next(task for task in tasks if "matmul" in task.name)
    with pytest.raises(RecordError, match="does not fit"):
        apply_schedules(kernels, {tanh.workload_hash: schedules[matmul.workload_hash]})


def test_the_passes_work_in_a_sequential(model, schedules):
    with TARGET:
        tuned = tvm.transform.Sequential([FoldWeights(), LowerToKernels(), ApplyTuned(schedules=schedules)])(model)
    np.testing.assert_allclose(
        ModelRunner(build_executable(tuned, TARGET))(data())[0],
        ModelRunner(untuned_executable(model, TARGET))(data())[0],
        rtol=1e-4,
        atol=1e-4,
    )


def test_kernels_without_a_record_are_told_of_or_estimated(model, kernels, schedules, caplog):
    one = dict(list(schedules.items())[:1])
    with TARGET:
        ApplyTuned(schedules=one)(kernels)
        assert f"{len(schedules) - 1} of {len(schedules)} kernels have no schedule" in caplog.text
        caplog.clear()
        estimated = ApplyTuned(schedules=one, estimate=True)(kernels)
    assert "no schedule" not in caplog.text
    assert all(
        "tirx.is_scheduled" in function.attrs
        for _, function in estimated.functions_items()
        if isinstance(function, tirx.PrimFunc)
    )
    np.testing.assert_allclose(
        ModelRunner(build_executable(estimated, TARGET))(data())[0],
        ModelRunner(untuned_executable(model, TARGET))(data())[0],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("again", ["ApplyTuned", "LowerToKernels", "the pipeline"])
def test_kernels_that_are_scheduled_stay_as_they_are(model, kernels, schedules, again):
    with TARGET:
        tuned = ApplyTuned(schedules=schedules, estimate=True)(kernels)
        if again == "ApplyTuned":
            tuned = ApplyTuned(estimate=True)(tuned)
        elif again == "LowerToKernels":
            tuned = ApplyTuned(estimate=True)(LowerToKernels()(tuned))
    pipeline = {"relax_pipeline": "eqtune"} if again == "the pipeline" else {}
    np.testing.assert_allclose(
        ModelRunner(tvm.compile(tuned, TARGET, **pipeline))(data())[0],
        ModelRunner(untuned_executable(model, TARGET))(data())[0],
        rtol=1e-4,
        atol=1e-4,
    )
    assert extract_tasks(tuned) == []
    with pytest.raises(InputError, match="every PrimFunc there is scheduled already"):
        tune_kernels(tuned)


@pytest.mark.parametrize("error", [ValueError, InternalError, TypeError, IndexError, RuntimeError])
def test_estimates_are_of_schedules_that_can_be_lowered(kernels, monkeypatch, error):
    def refuse(function):
        raise error("the loop is marked as ragged but its blocks end elsewhere")

    schedules = analytic_schedules(extract_tasks(kernels), Hardware(threads=1))
    monkeypatch.setattr("eqtune.search.space.lowering.prepare_for_lowering", refuse)
    assert tvm_ffi.structural_equal(apply_schedules(kernels, schedules), kernels)
    monkeypatch.undo()
    schedules = analytic_schedules(extract_tasks(kernels), Hardware(threads=1))
    assert not tvm_ffi.structural_equal(apply_schedules(kernels, schedules), kernels)


def test_only_kernels_of_the_form_that_is_chosen_are_scheduled(kernels, monkeypatch):
    scheduled = []
    real = best.lowerable_schedule
    monkeypatch.setattr(best, "lowerable_schedule", lambda *a: scheduled.append(a) or real(*a))
    tasks = extract_tasks(kernels)
    schedules = analytic_schedules(tasks, Hardware(threads=1))
    assert all(schedule.latency_s > 0 for schedule in schedules.values())
    assert not scheduled
    apply_schedules(kernels, schedules)
    assert len(scheduled) == len(tasks)


def test_packing_without_a_relax_function_stays_in_the_kernel(kernels, schedules):
    task = next(task for task in extract_tasks(kernels) if "matmul" in task.name)
    mod = apply_schedules(tvm.IRModule({"kernel": task.mod["main"]}), schedules)
    assert "layout_rewrite_preproc" in pack_weights(mod)["kernel"].script()


def split_packing(shape, index_map, **options):
    """A weight, the function that packs it as a schedule would, and its packed shape."""
    source = te.placeholder(shape, "float32", name="source")
    result = te.compute(shape, lambda *i: source(*i) * 2.0, name="result")
    sch = Schedule(te.create_prim_func([source, result]))
    copy = sch.cache_read("result", 0, "global")
    sch.transform_layout(copy, ("write", 0), index_map, **options)
    sch.annotate(copy, "meta_schedule.layout_rewrite_preproc", True)
    builder = relax.BlockBuilder()
    kernel = builder.add_func(sch.mod["main"].without_attr("global_symbol"), "kernel")
    with builder.function("main", []):
        ty = relax.TensorType(shape, "float32")
        builder.emit_func_output(builder.emit(relax.call_tir(kernel, [constant(*shape)], ty)))
    mod = relax.transform.SplitLayoutRewritePreproc()(builder.get())
    return mod["kernel_weight_prepack"]


@pytest.mark.parametrize(
    ("shape", "index_map", "options"),
    [
        ((96, 128), lambda k, n: (n // 32, k, n % 32), {}),
        ((96, 100), lambda k, n: (n // 32, k, n % 32), {"pad_value": 0.0}),
        ((99, 100), lambda k, n: (n // 32, k // 8, k % 8, n % 32), {"pad_value": 0.0}),
        ((70, 48, 3, 3), lambda o, i, y, x: (o // 32, i // 16, y, x, i % 16, o % 32), {"pad_value": 0.0}),
        ((64, 16, 3, 3), lambda o, i, y, x: (o // 32, i * 9 + y * 3 + x, o % 32), {}),
        ((40, 1, 3, 3), lambda o, i, y, x: (o // 16, i, y, x, o % 16), {"pad_value": 0.0}),
        ((5, 7), lambda i, j: (j, i), {}),
    ],
)
def test_numpy_packs_as_the_compiled_function_does(shape, index_map, options):
    function = split_packing(shape, index_map, **options)
    weight = np.random.default_rng(0).standard_normal(shape).astype("float32")
    packed = pack(function, [weight])
    assert packed is not None
    library = tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), TARGET).jit()
    want = tvm.runtime.tensor(np.zeros(packed[0].shape, "float32"))
    library["main"](tvm.runtime.tensor(weight), want)
    np.testing.assert_array_equal(packed[0], want.numpy())


def test_packing_that_mixes_axes_is_compiled(model):
    function = split_packing((64, 48), lambda k, n: ((k * 48 + n) // 32, (k * 48 + n) % 32))
    assert pack(function, [np.zeros((64, 48), "float32")]) is None

    def mixed(mod):
        sch = Schedule(mod)
        copy = sch.cache_read("matmul", 1, "global")
        sch.transform_layout(copy, ("write", 0), lambda k, n: ((k * 100 + n) // 32, (k * 100 + n) % 32))
        sch.annotate(copy, "meta_schedule.layout_rewrite_preproc", True)
        return sch

    kernels = lower_to_kernels(model, TARGET)
    task = next(t for t in extract_tasks(kernels) if list(t.mod["main"].params[-1].shape) == [8, 100])
    tuned = ApplyTuned(schedules={task.workload_hash: mixed})(kernels)
    weights = [types[1] for name, types in calls(tuned) if "matmul" in name]
    assert [tuple(int(e) for e in ty.shape) for ty in weights] == [(96, 96), (96, 96), (300, 32)]
    got = ModelRunner(build_executable(kernels, TARGET, {task.workload_hash: mixed}))(data())
    np.testing.assert_allclose(got[0], ModelRunner(untuned_executable(model, TARGET))(data())[0], rtol=1e-4, atol=1e-4)


def test_weights_of_bfloat16_that_numpy_cannot_pack_are_packed_by_compiled_code():
    source = te.placeholder((64, 48), "bfloat16", name="source")
    result = te.compute((64, 48), lambda *i: source(*i) + source(*i), name="result")
    sch = Schedule(te.create_prim_func([source, result]))
    copy = sch.cache_read("result", 0, "global")
    sch.transform_layout(copy, ("write", 0), lambda k, n: ((k * 48 + n) // 32, (k * 48 + n) % 32))
    sch.annotate(copy, "meta_schedule.layout_rewrite_preproc", True)
    builder = relax.BlockBuilder()
    kernel = builder.add_func(sch.mod["main"].without_attr("global_symbol"), "kernel")
    weight = np.arange(64 * 48).reshape(64, 48).astype(numpy_dtype("bfloat16"))
    with builder.function("main", []):
        call = relax.call_tir(kernel, [constant_of(weight)], relax.TensorType((64, 48), "bfloat16"))
        builder.emit_func_output(builder.emit(call))
    (packed,) = constants(pack_weights(builder.get()))
    np.testing.assert_array_equal(array_of(packed), weight.reshape(96, 32))


def test_outputs_outlive_the_next_run(kernels):
    vm = relax.VirtualMachine(build_executable(kernels, TARGET), tvm.cpu())
    first = vm["main"](tvm.runtime.tensor(data()))
    kept = first.numpy()
    vm["main"](tvm.runtime.tensor(-data()))
    np.testing.assert_array_equal(first.numpy(), kept)


@pytest.mark.parametrize(("target", "captured"), [("nvidia/nvidia-h100", True), (BOARD, False)])
def test_kernels_of_a_gpu_are_launched_as_one_graph(kernels, target, captured, monkeypatch):
    built = []
    monkeypatch.setattr(relax, "build", lambda mod, *_, **__: built.append(mod))
    build_executable(kernels, resolve_target(target))
    assert ("vm.builtin.cuda_graph.run_or_capture" in built[0].script()) is captured


def test_kernels_that_forms_share_are_estimated_once(kernels, monkeypatch):
    tasks, built, hardware = extract_tasks(kernels), [], Hardware(threads=1)
    build = analytic.build_space
    monkeypatch.setattr(analytic, "build_space", lambda *a: built.append(a) or build(*a))
    estimated: dict = {}
    first = analytic_schedules(tasks, hardware, estimated=estimated)
    assert len(built) == len(first) == len(tasks)
    assert analytic_schedules(tasks[:1], hardware, estimated=estimated).items() <= first.items()
    assert len(built) == len(tasks)
    analytic_schedules(tasks[:1], Hardware(threads=2), estimated=estimated)
    assert len(built) == len(tasks) + 1, "of another machine"
