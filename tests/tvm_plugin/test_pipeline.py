"""After a plain `import tvm`, TVM knows the pipeline "eqtune"; a known bad pair of versions is refused in one line."""

import logging
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.s_tir import Schedule

import eqtune
from eqtune import _compat, backend
from eqtune.cli import main
from eqtune.compile.untuned import untuned_executable
from eqtune.errors import InputError, SetupError
from eqtune.gpu_machine import resolve_target
from eqtune.machine import device_name, target_json
from eqtune.records import Context, Record, RecordDatabase
from eqtune.records.traces import trace_to_json
from eqtune.records.workload import serialize_workload
from eqtune.runtime import ModelRunner
from eqtune.schedules.stored import stored_schedules
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import ApplyTuned, EqualitySaturation, LowerToKernels

TARGET = tvm.target.Target("llvm")

PROGRAM = """
import numpy as np
import tvm
from tvm import relax

builder = relax.BlockBuilder()
x = relax.Var("x", relax.TensorType((1, 4, 6, 6), "float32"))
weight = np.random.default_rng(0).standard_normal((8, 4, 3, 3)).astype("float32")
with builder.function("main", [x]):
    with builder.dataflow():
        y = builder.emit(relax.op.nn.conv2d(x, relax.const(weight), padding=1))
        result = builder.emit_output(relax.op.nn.relu(y))
    builder.emit_func_output(result)
target = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(), "num-cores": 1})
data = tvm.runtime.tensor(np.random.default_rng(1).standard_normal((1, 4, 6, 6)).astype("float32"))
got, want = (
    relax.VirtualMachine(relax.build(builder.get(), target, relax_pipeline=name), tvm.cpu())["main"](data).numpy()
    for name in ("eqtune", "default")
)
assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), np.abs(got - want).max()
print("equal")
"""


def test_relax_build_finds_the_pipeline_in_a_new_process():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


def test_registering_again_changes_nothing():
    before = relax.pipeline.PIPELINE_MAP["eqtune"]
    backend.register()
    assert relax.pipeline.PIPELINE_MAP["eqtune"] is before


def test_import_tvm_loads_no_search():
    program = "import sys, tvm; print([m for m in ('egglog', 'xgboost', 'scipy.optimize') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def versions(**installed):
    def version(name):
        if installed.get(name) is None:
            raise PackageNotFoundError(name)
        return installed[name]

    return version


@pytest.mark.parametrize(
    ("tvm_version", "ffi_version", "named"),
    [
        ("0.27.0.post1", "0.1.15.post2", ["0.27.0.post1", "0.1.15.post2", "0.1.14"]),
        ("0.27.0", "0.1.15", ["0.1.15"]),
        ("0.26.0", "0.1.14", ["0.26.0", "0.27"]),
        (None, "0.1.14", ["apache-tvm is not installed"]),
        ("0.27.0", None, ["apache-tvm-ffi is not installed"]),
    ],
)
def test_versions_that_cannot_work_are_refused(monkeypatch, tvm_version, ffi_version, named):
    monkeypatch.setattr(_compat, "version", versions(**{"apache-tvm": tvm_version, "apache-tvm-ffi": ffi_version}))
    with pytest.raises(SetupError, match="pip install") as caught:
        _compat.check_versions()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in named)


def test_every_door_but_help_refuses_them(monkeypatch, capsys):
    monkeypatch.setattr(_compat, "version", versions(**{"apache-tvm": "0.27.0", "apache-tvm-ffi": "0.1.15"}))
    for command in (["tune", "zoo:squeezenet"], ["records", "list"], ["graph", "--list-rules"]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert said.startswith("eqtune: error: apache-tvm 0.27.0 crashes with apache-tvm-ffi 0.1.15")
        assert said.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    for name in ("tune_model", "zoo"):
        monkeypatch.delitem(vars(eqtune), name, raising=False)  # as in a process that did not load it yet
        with pytest.raises(SetupError, match="crashes"):
            getattr(eqtune, name)


PACKAGES = """
import importlib
from importlib import metadata

installed = metadata.version
metadata.version = lambda name: "0.1.15" if name == "apache-tvm-ffi" else installed(name)
from eqtune.errors import SetupError

for name in ("frontends", "machine", "measure.local", "relay", "tasks", "transform", "tune", "zoo"):
    try:
        importlib.import_module(f"eqtune.{name}")
    except SetupError as error:
        print(name, "crashes" in str(error))
"""


def test_packages_that_are_asked_for_by_name_refuse_them_too():
    done = subprocess.run([sys.executable, "-c", PACKAGES], capture_output=True, text=True, timeout=60, check=True)
    names = ["frontends", "machine", "measure.local", "relay", "tasks", "transform", "tune", "zoo"]
    assert done.stdout.splitlines() == [f"{name} True" for name in names]


def test_every_pass_that_models_begin_with_can_be_had_alone():
    known = vars(import_module("eqtune.transform.simplify"))
    classes = {name: value for name, value in known.items() if isinstance(value, type)}
    passes = {name: value for name, value in classes.items() if issubclass(value, tvm.transform.Pass)}
    assert len(passes) > 10
    assert {name: getattr(eqtune.transform, name) for name in passes} == passes
    assert passes.keys() <= set(eqtune.transform.__all__)


@pytest.mark.parametrize("ffi_version", ["0.1.14.post0", "0.1.14.post1"])
def test_versions_that_work_pass(monkeypatch, ffi_version):
    monkeypatch.setattr(_compat, "version", versions(**{"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": ffi_version}))
    _compat.check_versions()


@pytest.fixture(scope="module")
def model():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.tanh(x))
        builder.emit_func_output(result)
    return builder.get()


@pytest.fixture
def work_dir(model, tmp_path):
    """Records of one kernel: two schedules for this target, a faster one for another."""
    (task,) = extract_tasks(lower_to_kernels(model, TARGET))

    def trace(kind):
        sch = Schedule(task.mod)
        getattr(sch, kind)(sch.fuse(*sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])))
        return trace_to_json(sch.trace)

    here = Context(target_json(TARGET), device_name(TARGET), 2, tvm.__version__)
    elsewhere = Context(here.target, "another machine", 2, tvm.__version__)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(task.workload_hash, serialize_workload(task.mod), name=task.name, flops=task.flops)
        database.add(
            [
                Record(task.workload_hash, "", trace("parallel"), here, (2e-6,)),
                Record(task.workload_hash, "", trace("vectorize"), here, (1e-6,)),
                Record(task.workload_hash, "", trace("unroll"), elsewhere, (1e-9,)),
            ]
        )
    return tmp_path


def body(mod):
    return "\n".join(f.script() for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc))


def test_the_best_record_of_this_context_is_applied(model, work_dir):
    kernels = lower_to_kernels(model, TARGET)
    with TARGET:
        assert "T.vectorized" in body(ApplyTuned(work_dir)(kernels))
        assert "T.vectorized" in body(ApplyTuned(work_dir / "records.sqlite")(kernels))
    context = Context(target_json(TARGET), "another machine", 2, tvm.__version__)
    assert "T.unroll" in body(ApplyTuned(work_dir, context)(kernels))


def test_a_kernel_in_the_records_never_replaces_the_models_own(model, tmp_path):
    kernels = lower_to_kernels(model, TARGET)
    (task,) = extract_tasks(kernels)
    x = te.placeholder((4, 6), "float32", "x")
    other = te.create_prim_func([x, te.compute((4, 6), lambda i, j: x[i, j] + 1.0, "compute")])
    context = Context(target_json(TARGET), "a machine", 2, tvm.__version__)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(task.workload_hash, serialize_workload(other), name="forged", flops=1.0)
        database.add([Record(task.workload_hash, "", "[[],[]]", context, (1e-9,))])
    expected = ApplyTuned(schedules={task.workload_hash: "[[],[]]"})(kernels)
    tvm.ir.assert_structural_equal(ApplyTuned(tmp_path, context)(kernels), expected)


def test_records_of_another_target_never_match(model, work_dir, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("eqtune"), "propagate", True)
    other = tvm.target.Target({"kind": "llvm", "mcpu": "haswell"})
    with other, caplog.at_level(logging.WARNING, "eqtune"):
        assert stored_schedules(work_dir) == {}
    assert "holds no records for target" in caplog.text


def test_records_of_a_portable_target_match_whichever_machine_measured_them(model, tmp_path):
    """Code for x86-64-v2 is built in one place and measured in another."""
    portable = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2"})
    (task,) = extract_tasks(lower_to_kernels(model, portable))
    context = Context(target_json(portable), "board over rpc, key board", 2, tvm.__version__)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(task.workload_hash, serialize_workload(task.mod), name=task.name, flops=task.flops)
        database.add([Record(task.workload_hash, "", trace_to_json(Schedule(task.mod).trace), context, (1e-6,))])
    with portable:
        assert stored_schedules(tmp_path).keys() == {task.workload_hash}
    with TARGET:
        assert stored_schedules(tmp_path) == {}


def test_records_of_a_gpu_are_found_whatever_its_target_says_of_limits(model, tmp_path):
    """Only products by warpgroups, which are fastest here, need the letter behind the architecture."""
    measured = resolve_target("nvidia/nvidia-h200")
    (task,) = extract_tasks(lower_to_kernels(model, measured))
    context = Context(target_json(measured), device_name(measured), 132, tvm.__version__)
    traces = [trace_to_json(Schedule(task.mod).trace), '[["Tensorize",["l0"],["eqtune_wgmma_x",true],[]]]']
    records = [Record(task.workload_hash, "", trace, context, (5e-6 - n * 1e-6,)) for n, trace in enumerate(traces)]
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(task.workload_hash, serialize_workload(task.mod), name=task.name, flops=task.flops)
        database.add([*records, Record(task.workload_hash, "", "", context, error="crash")])
    for arch, found in (("sm_90a", traces[1]), ("sm_90", traces[0]), ("sm_80", None)):
        fields = {"kind": "cuda", "arch": arch, "max_threads_per_block": 1024, "tag": "nvidia/nvidia-h200"}
        with tvm.target.Target(fields):
            stored = stored_schedules(tmp_path)
        assert [one.trace for one in stored.values()] == ([] if found is None else [found])


def test_missing_records_and_a_missing_target_are_named(work_dir, tmp_path):
    with pytest.raises(InputError, match="no records at"):
        stored_schedules(tmp_path / "nowhere")
    with pytest.raises(InputError, match="with target:"):
        stored_schedules(work_dir)


def test_what_a_pass_refuses_keeps_its_class_through_a_sequential(model, work_dir, tmp_path):
    for refused, message in (
        (ApplyTuned(records=tmp_path / "nowhere"), "^there are no records at"),
        (ApplyTuned(records=3), "^records is the work_dir of an eqtune.tune_model run, or its database, not 3"),
        (LowerToKernels(), r"needs a tvm\.target\.Target, not None: give .* `with target:`"),
        (LowerToKernels("llvm"), "needs a tvm.target.Target, not 'llvm'"),
        (ApplyTuned(records=work_dir, context="here"), "context is an eqtune.records.Context, .*, not 'here'"),
        (relax.get_pipeline("eqtune"), "^the pipeline needs a target: .* `with target:`"),
        (EqualitySaturation("saturate"), "config is an eqtune.GraphConfig, not 'saturate'"),
    ):
        with pytest.raises(InputError, match=message):
            tvm.transform.Sequential([refused])(model)
    with pytest.raises(InputError, match=r"^ApplyTuned\(..., estimate=True\) needs a target: "):
        ApplyTuned(estimate=True)(lower_to_kernels(model, TARGET))
    with pytest.raises(InputError, match="of the kind 'c' cannot be tuned"):
        tvm.compile(model, "c", relax_pipeline="eqtune")


def test_the_pipeline_reads_the_work_directory_of_the_environment(model, work_dir, monkeypatch):
    monkeypatch.setenv("EQTUNE_WORK_DIR", str(work_dir))
    pipeline = relax.get_pipeline("eqtune", graph=False)
    with TARGET:
        assert "T.vectorized" in body(pipeline(model))
    data = np.linspace(-2, 2, 24, dtype="float32").reshape(4, 6)
    got = ModelRunner(relax.build(model, TARGET, relax_pipeline=pipeline))(data)
    np.testing.assert_allclose(got[0], ModelRunner(untuned_executable(model, TARGET))(data)[0], rtol=1e-6)


def test_the_passes_of_the_readme_run_as_they_stand_there(model, tmp_path, monkeypatch):
    blocks = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split("```")
    (snippet,) = (block.removeprefix("python\n") for block in blocks if "transform.Sequential(\n" in block)
    RecordDatabase(tmp_path / "records.sqlite").close()
    monkeypatch.chdir(tmp_path.parent)
    names = {"tvm": tvm, "eqtune": eqtune, "mod": model}
    exec(snippet.replace('"work"', repr(tmp_path.name)), names)
    assert "T.vectorized" in body(names["mod"])


def test_the_pipeline_compiles_a_model_whose_batch_varies():
    """Its kernels are left to TVM."""
    op, batch = relax.op, tvm.tirx.Var("batch", "int64")
    rng = np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType((batch, 4, 6, 6), "float32"))
    taps, weight = (relax.const(rng.standard_normal(shape).astype("float32")) for shape in ((8, 4, 3, 3), (288, 5)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(x, taps, padding=1))))
            result = builder.emit_output(op.matmul(builder.emit(op.reshape(y, (batch, 288))), weight))
        builder.emit_func_output(result)
    got, want = (ModelRunner(relax.build(builder.get(), TARGET, relax_pipeline=name)) for name in ("eqtune", "default"))
    for extent in (1, 3):
        data = rng.standard_normal((extent, 4, 6, 6)).astype("float32")
        np.testing.assert_allclose(got(data)[0], want(data)[0], rtol=1e-4, atol=1e-4)
