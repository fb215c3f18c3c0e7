"""Full disks, places that cannot be written to, moments that were too busy: one clear line, and nothing lost."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.support import cc

import eqtune
from eqtune.cli import main
from eqtune.measure import LocalMeasurer
from eqtune.measure.base import Measurement
from eqtune.report.curves import convergence
from eqtune.runtime import linker_of
from eqtune.tune.settings import Settings
from eqtune.tune.workdir import WorkDirectory


def model(identity: bool = False) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 256), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(x if identity else relax.op.nn.softmax(x))
        builder.emit_func_output(y)
    return builder.finalize()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--work-dir", "file"), "cannot be written"),
        (("--work-dir", "file/below"), "cannot be written"),
        (("--threads", 100_000), "threads must be at most"),
        (("--params", "file"), "is not a .npz file of plain arrays; write one"),
        (("--report", "file/report.html"), "file/report.html cannot be written"),
        (("--export", "file/model.so"), "file/model.so cannot be written"),
        (("--report", ""), "'' cannot be written"),
        (("--export", ""), "cannot export to ''"),
        (("--shape", "x=1,2"), "'zoo:nasrnn' has weights and shapes"),
        (("--budget", "nan"), "more than 0"),
        (("--budget", "inf"), "more than 0"),
        (("--export", "m.so", "--measure", "compile-only"), "leave out --export"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    message: str,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "zoo:nasrnn", *map(str, arguments)]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
@pytest.mark.parametrize(("option", "file"), [("--export", "/proc/model.so"), ("--report", "/proc/page.html")])
def test_a_folder_that_takes_no_file_is_told_before_tuning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str, file: str
) -> None:
    """Whatever its mode says, as of the superuser's."""
    assert main(["tune", "zoo:nasrnn", option, file, "--work-dir", str(tmp_path / "work")]) == 2
    assert f"{file} cannot be written; name a file in a folder that you may write to" in capfd.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_missing_compiler_is_told_before_tuning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cc, "get_cc", lambda: None)
    assert main(["tune", "zoo:nasrnn", "--export", "model.so"]) == 1
    said = capfd.readouterr().err
    assert "there is no C++ compiler, which links model.so: install g++, or export a .tar, which needs none" in said
    assert len(said.strip().splitlines()) == 1


def test_a_missing_cross_compiler_is_told_before_tuning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    target = '{"kind": "llvm", "mtriple": "riscv64-linux-gnu"}'
    assert main(["tune", "zoo:nasrnn", "--export", "model.so", "--target", target]) == 1
    missing = "riscv64-linux-gnu-g++"
    assert f"there is no {missing}, which links model.so: install {missing}, or export a .tar" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trials": "8"}, "trials is a whole number, not '8'"),
        ({"trials": 1.5}, "trials is a whole number, not 1.5"),
        ({"threads": True}, "threads is a whole number, not True"),
        ({"seed": None}, "seed is a whole number, not None"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"seed": 2**63}, r"seed must be less than 2\*\*63"),
        ({"time_budget_s": "60"}, "time_budget_s is a number of seconds, not '60'"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(eqtune.InputError, match=message):
        eqtune.tune_model(model(), work_dir=tmp_path / "work", progress=False, **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "work").exists()


def test_numbers_of_numpy_are_numbers() -> None:
    """Workers are told them as JSON, which does not take numpy's."""
    given: Any = {"trials": np.int64(8), "threads": np.int8(2), "seed": np.uint32(3), "time_budget_s": np.float32(1.5)}
    settings = Settings(**given)
    numbers = [settings.trials, settings.threads, settings.seed, settings.time_budget_s]
    assert json.dumps(numbers) == "[8, 2, 3, 1.5]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [8]}, r"sizes are a mapping of names to whole numbers, .* not \[8\]"),
        ({"shapes": [(1, 2)]}, "shapes is a mapping by name, not list"),
        ({"shapes": {"x": 3}}, "has weights and shapes"),
    ],
)
def test_shapes_that_are_none_are_refused_for_a_model_by_name(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    """The command that does it again was made of them before anybody had looked."""
    with pytest.raises(eqtune.InputError, match=message):
        eqtune.tune_model(
            "zoo:nasrnn:steps=1:hidden=32", graph="off", work_dir=tmp_path / "work", progress=False, **arguments
        )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"kind": "c"}, "of the kind 'c' cannot be tuned; give one of llvm, cuda"),
        ({"kind": "llvm", "mcpu": "zen99"}, "LLVM knows no CPU 'zen99'"),
        ({"kind": "llvm", "mtriple": "aaarch64-linux-gnu"}, "LLVM knows no machine 'aaarch64-linux-gnu'"),
        ({"kind": "llvm", "mtriple": "arch64", "mcpu": "cortex-a72"}, "LLVM knows no machine 'arch64'"),
        (tvm.target.Target({"kind": "opencl"}), "'opencl' cannot be tuned"),
    ],
)
def test_a_target_that_cannot_be_tuned_is_refused(tmp_path: Path, target: object, message: str) -> None:
    with pytest.raises(eqtune.InputError, match=message):
        eqtune.tune_model(model(), target=target, work_dir=tmp_path / "work", progress=False)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"kind": "llvm", "mtriple": "riscv64-linux-gnu"}, r"this is \w+, not riscv64"),
        ({"kind": "llvm", "mcpu": "graniterapids"}, r"lacks amx-"),
    ],
)
def test_a_target_that_does_not_run_here_is_one_line(tmp_path: Path, target: object, reason: str) -> None:
    with pytest.raises(eqtune.SetupError, match=rf"does not run on this machine: .*{reason}.*rpc://"):
        eqtune.tune_model(model(), target=target, time_budget_s=5, work_dir=tmp_path / "work", progress=False)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_older_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkDirectory(tmp_path) as work:
        path = work.write_json("summary.json", {"run": 1})
        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(eqtune.RecordError, match=r"No space left on device.*run again"):
            work.write_json("summary.json", {"run": 2})
        monkeypatch.setattr(np, "savez", full)
        with pytest.raises(eqtune.RecordError, match="No space left on device"):
            work.save_reference("key", [np.zeros(3)])
    assert path.read_text() == '{\n "run": 1\n}'


def test_two_runs_in_one_work_directory_write_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file = os.replace
    with WorkDirectory(tmp_path) as work, WorkDirectory(tmp_path) as other:

        def meanwhile(*paths: Path) -> None:
            """The other run writes the same file just before this one is complete."""
            monkeypatch.setattr(os, "replace", replace_file)
            other.write_json("summary.json", {"run": 2})
            replace_file(*paths)

        monkeypatch.setattr(os, "replace", meanwhile)
        path = work.write_json("summary.json", {"run": 1})
    assert json.loads(path.read_text()) == {"run": 1}


def test_what_was_not_written_whole_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*paths: Path) -> None:
        raise KeyboardInterrupt

    with WorkDirectory(tmp_path) as work:
        before = set(tmp_path.iterdir())
        monkeypatch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            work.save_reference("key", [np.zeros(3)])
        assert set(tmp_path.iterdir()) == before


def test_ctrl_c_while_tvm_runs_a_pass_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through TVM's C++ it came back as a RuntimeError: a traceback, or a module that was taken for a strange one."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    saved = tmp_path / "model.json"
    saved.write_text(str(tvm.ir.save_json(model())))
    monkeypatch.setattr("eqtune.tasks.lower._reshape_outputs", tvm.transform.module_pass(interrupt, opt_level=0))
    assert main(["kernels", str(saved), "--list"]) == 130
    assert "eqtune: interrupted" in capfd.readouterr().err


def test_a_full_disk_does_not_make_the_log_print(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with WorkDirectory(tmp_path):
        (handler,) = (h for h in logging.getLogger("eqtune").handlers if isinstance(h, logging.FileHandler))
        handler.stream.close()
        handler.stream = open("/dev/full", "w")  # noqa: SIM115 - the handler closes it
        logging.getLogger("eqtune").info("lost")
        with pytest.raises(OSError, match="No space"):
            handler.stream.close()
        handler.stream = open(os.devnull, "w")  # noqa: SIM115
    assert capfd.readouterr().err == ""


class BusyMoment(LocalMeasurer):
    """Something else runs whenever candidates are measured for the first time."""

    def measure(self, *arguments: Any, **keywords: Any) -> list[Measurement]:
        measured = super().measure(*arguments, **keywords)
        return [replace(m, latencies_s=tuple(1e3 * s for s in m.latencies_s)) for m in measured]


def test_a_schedule_that_was_measured_at_a_bad_moment_is_looked_at_again(tmp_path: Path) -> None:
    target = eqtune.machine.detect_target()
    measurer = BusyMoment(target)
    kernels = eqtune.tasks.lower_to_kernels(model(), target)
    result = eqtune.tune_kernels(kernels, trials=8, work_dir=tmp_path / "work", measure=measurer, progress=False)
    assert all(task.tuned for task in result.tasks)
    assert all(task.latency_s <= task.baseline_latency_s for task in result.tasks)


def test_a_model_without_kernels_is_returned_as_it_is(tmp_path: Path) -> None:
    result = eqtune.tune_model(model(identity=True), work_dir=tmp_path / "work", trials=4, progress=False)
    x = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
    np.testing.assert_array_equal(result.run(x)[0], x)
    assert result.report(tmp_path / "report.html").exists()


def test_a_library_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    result = eqtune.tune_model(model(identity=True), work_dir=tmp_path / "work", trials=4, progress=False)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(eqtune.InputError, match="cannot be written"):
        result.export(tmp_path / "file" / "model.so")
    with pytest.raises(eqtune.InputError, match="cannot be written"):
        result.report(tmp_path / "file" / "report.html")
    with pytest.raises(eqtune.InputError, match=r"a path that ends in \.so or \.tar, not None"):
        result.export(None)
    with pytest.raises(eqtune.InputError, match="a report is written to a path, not 3"):
        result.report(3)


def test_a_library_that_cannot_be_linked_leaves_the_older_one(tmp_path: Path) -> None:
    result = eqtune.tune_model(model(identity=True), work_dir=tmp_path / "work", trials=4, progress=False)
    path = tmp_path / "model.so"
    path.write_text("an older library")
    with pytest.raises(eqtune.SetupError, match="could not be linked"):
        result.export(path, compiler="false")
    assert path.read_text() == "an older library"
    assert [file.name for file in tmp_path.glob("*model*")] == ["model.so"]
    result.export(path)
    assert path.stat().st_size > 1000


def test_a_cross_compiler_links_for_another_machine() -> None:
    there = tvm.target.Target({"kind": "llvm", "mtriple": "riscv64-linux-gnu"})
    assert linker_of(there) == "riscv64-linux-gnu-g++"
    assert linker_of(eqtune.machine.detect_target()) is None


def test_a_model_that_was_kept_untuned_has_no_curve() -> None:
    trials: Sequence[tuple[str, float]] = [("a" * 16, 1e-3)]
    assert convergence(trials, calls={}, baselines_s={}) == ()


@pytest.mark.parametrize("dtype", ["string", "complex64"])
def test_an_onnx_input_of_a_foreign_dtype_is_refused_by_name(dtype: str) -> None:
    onnx = pytest.importorskip("onnx")
    kind = onnx.TensorProto.DataType.Value(dtype.upper())
    values = [onnx.helper.make_tensor_value_info(name, kind, [1, 4]) for name in ("words", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["words"], ["y"])], "g", values[:1], values[1:])
    with pytest.raises(eqtune.UnsupportedModelError, match=f"input 'words' has dtype {dtype}"):
        eqtune.frontends.load_model(onnx.helper.make_model(graph))
