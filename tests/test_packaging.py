"""What users install: every subpackage is in the wheel, and a plain import stays cheap."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import eqtune
from eqtune.cli import main, options

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "tvm_plugin": "eqtune",
    "search": "eqtune.search",
    "cost_model": "eqtune.cost_model",
    "records": "eqtune.records",
}


def packages_on_disk() -> set[str]:
    found = set()
    for folder, name in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def test_every_folder_is_a_listed_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == packages_on_disk()


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_works(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("eqtune-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    for folder, package in FOLDERS.items():
        for source in (ROOT / folder).rglob("*.py"):
            inside = "/".join([*package.split("."), *source.relative_to(ROOT / folder).parts])
            assert inside in names
    assert not any(name.startswith(("tests/", "records/", "search/", "tvm_plugin/")) for name in names)
    assert "eqtune/report/page.html" in names

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert run("-c", "import eqtune; print(eqtune.__file__)").startswith(str(tmp_path))
    assert "usage: eqtune" in run("-m", "eqtune", "--help")


@pytest.mark.parametrize("module", ["eqtune", "eqtune.records", "eqtune.cli", "eqtune.errors"])
def test_a_plain_import_loads_neither_tvm_nor_torch(module: str) -> None:
    code = (
        f"import {module}, sys; print([m for m in ('tvm', 'torch', 'onnx', 'xgboost', 'egglog') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", ["search", "cost_model", "records"])
def test_a_folder_imported_under_its_own_name_is_refused(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert f"import this package as 'eqtune.{folder}'" in done.stderr


def test_public_names_are_what_all_says() -> None:
    for name in eqtune.__all__:
        assert getattr(eqtune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'tune_modle'"):
        eqtune.tune_modle  # noqa: B018


COMMANDS = ("tune", "kernels", "graph", "report", "watch", "records", "doctor")


def test_help_lists_every_command_quickly() -> None:
    done = subprocess.run([sys.executable, "-m", "eqtune", "--help"], capture_output=True, text=True, check=True)
    for command in COMMANDS:
        assert command in done.stdout
    assert "130 interrupted" in done.stdout
    code = (
        "import sys\nfrom eqtune.cli import build_parser\nbuild_parser().format_help()\n"
        "print([m for m in ('tvm', 'numpy', 'xgboost') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    from eqtune import cost_model
    from eqtune.measure import FORMS
    from eqtune.search import allocation, strategies

    names = {*strategies.names(), *cost_model.names(), *allocation.names(), *FORMS}
    assert sorted(options.STRATEGIES) == strategies.names()
    assert sorted(options.COST_MODELS) == sorted(cost_model.names())
    assert sorted(options.ALLOCATORS) == allocation.names()
    for command in ("tune", "kernels"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        words = "".join(capsys.readouterr().out.split())
        assert [name for name in names if name not in words] == []


def imported_by(path: Path) -> set[str]:
    """What a module of `tvm_plugin` imports of it, as dotted names; not what only types need."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    here = path.relative_to(ROOT / "tvm_plugin").with_suffix("").parts
    found: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(here):
            base = [*here[: len(here) - node.level], *(node.module or "").split(".")]
            found |= {".".join([*filter(None, base), alias.name]) for alias in node.names}
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            nodes += ast.iter_child_nodes(node)
    return found


def test_imports_go_one_way() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = text.split("each line imports from those above it", 1)[1].split("\n\n")[1]
    lines = [re.split(r"  +", line.strip())[0].split(", ") for line in listed.splitlines()]
    place = {name: number for number, names in enumerate(lines) for name in names}

    def place_of(module: str) -> int | None:
        first, *rest = module.split(".")
        return place.get(".".join([first, *rest[:1]]), place.get(first))

    upwards = set()
    for path in (ROOT / "tvm_plugin").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "tvm_plugin").with_suffix("").parts).removesuffix(".__init__")
        own = place_of(module)
        if module.startswith("_"):
            continue
        assert own is not None, f"{module} is not in the list"
        upwards |= {(module, name) for name in imported_by(path) if (place_of(name) or 0) > own}
    assert upwards == {("machine", "measure.peaks.measure_speeds")}
