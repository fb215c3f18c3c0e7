"""What the documentation names exists: links, files, functions and passes, commands with their options."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

import eqtune
from eqtune import transform
from eqtune.cli import build_parser

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "cost_model", "docs", "records", "search", "tests", "tutorials", "tvm_plugin")
FILES = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*PAGES, *sorted((ROOT / "tutorials").glob("*.py"))]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return text if page.suffix == ".md" else text.replace("\n# ", "\n").replace("\n#\n", "\n\n")


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_of(text: str) -> list[list[str]]:
    """The words of every `eqtune COMMAND` with arguments, of blocks and of lines of text."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`(eqtune [a-z]+ [^`]*--[^`]*)`", text)]
    lines += re.findall(r"^ +(eqtune [a-z]+ .*)$", text, re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("eqtune ")]
    return [command[1:] for command in commands if not {"COMMAND", "[OPTIONS]"} & set(command)]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8"))
    for file, anchor in links:
        if file.startswith("https://"):
            continue
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), file
        assert not anchor or anchor in anchors_of(target), f"{file}#{anchor}"


@each_text
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`([\w./]+\.(?:py|md|cc|cpp))`", text_of(page))
    named += re.findall(r"\b(docs/[\w/]+\.md)\b", text_of(page))
    wanted = {name.removeprefix("../") for name in named}
    known = {*FILES, "README.md"}
    assert [name for name in sorted(wanted) if not any(f"/{file}".endswith(f"/{name}") for file in known)] == []


@each_text
def test_names_of_eqtune_exist(page: Path) -> None:
    names = re.findall(r"\beqtune((?:\.[A-Za-z_]\w*)+)", text_of(page))
    for name in sorted(set(names) - {".log", ".narrow_product", ".recurrent"}):  # a file, two operators
        found = eqtune
        for part in name[1:].split("."):
            if not hasattr(found, part):
                __import__(f"{found.__name__}.{part}")
            found = getattr(found, part)


@each_text
def test_commands_are_understood(page: Path) -> None:
    parser = build_parser()
    for command in commands_of(text_of(page)):
        parser.parse_args(command)


def test_commands_are_found() -> None:
    found = {command[0] for command in commands_of(text_of(ROOT / "README.md"))}
    assert found == {"doctor", "graph", "kernels", "records", "report", "tune", "watch"}
    assert commands_of("`eqtune tune model.onnx\n--size rows=100`") == [["tune", "model.onnx", "--size", "rows=100"]]


def test_the_example_of_tune_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["tune", "--help"])
    (example,) = re.findall(r"For example: eqtune (.*?\.so)", " ".join(capsys.readouterr().out.split()))
    assert build_parser().parse_args(example.split()).export == "model.so"


def test_every_pass_is_in_the_table() -> None:
    assert [name for name in transform.__all__ if f"`{name}`" not in (transform.__doc__ or "")] == []


def test_arguments_of_tune_model_are_documented() -> None:
    documented = inspect.getdoc(eqtune.tune_model) or ""
    for name in inspect.signature(eqtune.tune_model).parameters:
        assert re.search(rf"^(\w+, )*{name}(, \w+)* : ", documented, re.MULTILINE), name
