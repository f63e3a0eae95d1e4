"""The documentation: links lead somewhere, code blocks are what they say, the reference is that of the sources."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from kvferry.handoff import Handoff
from kvferryd.commands import cli
from kvferryd.config import OPTIONS
from kvferryd.plan.refused import MEANING

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
MARKDOWN = MarkdownIt("commonmark").enable("table")
ELSEWHERE = ("https://", "http://", "mailto:")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tokens(page: Path) -> list[Token]:
    return MARKDOWN.parse(page.read_text())


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, code) of every code block; of an indented one the language is not known."""
    for token in tokens(page):
        if token.type in ("fence", "code_block"):
            yield token.info.partition(" ")[0], token.content


def links(page: Path) -> Iterator[str]:
    for token in tokens(page):
        for child in token.children or ():
            for attribute in ("href", "src"):
                if child.attrGet(attribute):
                    yield str(child.attrGet(attribute))


@functools.cache  # some pages link to one another hundreds of times
def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and those that are named."""
    found = set(re.findall(r'<a id="([^"]+)">', page.read_text()))
    inside = False
    for token in tokens(page):
        if inside:
            plain = "".join(child.content for child in token.children or () if child.type in ("text", "code_inline"))
            found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
        inside = token.type == "heading_open"
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_ours_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        if not link.startswith(ELSEWHERE):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{link}: no such file"
            if anchor:
                assert anchor in anchors(target), f"{link}: {name(target)} has no such heading"


def test_a_broken_link_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Here it is\n[a](#here-it-is) [b](#not-here) ![c](gone.svg)\n")
    assert list(links(page)) == ["#here-it-is", "#not-here", "gone.svg"]
    assert anchors(page) == {"here-it-is"}


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in links(index) if not link.startswith(ELSEWHERE)}
    assert [name(page) for page in PAGES if page not in listed | {index} and page.parent != ROOT] == []


def test_decisions_are_short_and_say_instead_of_what() -> None:
    headings = re.compile(r"^#{2,3} .*\n", re.MULTILINE)
    page = (ROOT / "docs" / "decisions.md").read_text()
    for decision in page.split("\n### ")[1:]:
        title, text = headings.split(decision)[0].strip().split("\n", 1)
        assert "\n\nInstead of: " in text, title
        assert len(text.strip().splitlines()) < 15, f"{title}: rewrite it, or make it two"


def test_the_page_of_the_tests_names_files_that_exist_and_every_folder() -> None:
    """In its tables a path is one below tests/."""
    tests = ROOT / "tests"
    named = set(re.findall(r"`([a-z0-9]+/(?:[a-z0-9_]+\.py)?)`", (tests / "README.md").read_text()))
    assert len(named) > 100
    assert [path for path in sorted(named) if not (tests / path).exists()] == []
    folders = {f"{path.parent.name}/" for path in tests.glob("*/*.py")}
    assert folders - named == set()


def test_the_tests_of_each_room_exist() -> None:
    """CONTRIBUTING.md names the first file of a folder with the folder, and others after it without."""
    missing, folder = [], Path()
    for named in re.findall(r"tests/[\w/*]+(?:\.(?:py|md))?|\btest_[\w*]+\.py", (ROOT / "CONTRIBUTING.md").read_text()):
        path = ROOT / named if named.startswith("tests/") else folder / named
        folder = path.parent if path.suffix else path
        missing += [] if list(path.parent.glob(path.name)) else [named]
    assert missing == []


def test_pages_that_sources_speak_of_exist() -> None:
    for folder in ("clients", "daemon", "deploy", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".html", ".yaml", ".sh") and path != Path(__file__):
                for page in re.findall(r"\bdocs/[a-z_/]+\.md", path.read_text()):
                    assert (ROOT / page).exists(), f"{name(path)} speaks of {page}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_code_block_is_what_it_says(page: Path) -> None:
    for language, code in blocks(page):
        match language:
            case "python":
                compile(code, name(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            case "json":
                json.loads(code)
            case "yaml":
                assert list(yaml.safe_load_all(code))
            case "toml":
                assert tomllib.loads(code).keys() <= OPTIONS.keys()
            case _:
                assert language in ("", "sh", "text", "mermaid"), language


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_have_the_flags_that_they_are_shown_with(page: Path) -> None:
    for language, code in blocks(page):
        if language in ("", "sh"):
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if line.strip().startswith("kvferry ") else []
                command = words[1 : next((i for i, word in enumerate(words) if word in ("&", ">", "|")), None)]
                if command and command[0] not in cli.FORWARDED:
                    cli._parser().parse_args(command)


def test_no_page_makes_an_environment_where_make_has_one() -> None:
    """`pip install .` there would replace make's editable install, silently."""
    taken = set(re.findall(r"^\w*VENV +\?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert ".venv" in taken
    for page in PAGES:
        for _, code in blocks(page):
            for made in re.findall(r"-m venv (\S+)", code):
                assert made not in taken, f"{name(page)} makes {made}"


def test_the_first_version_fixes_and_changes_nothing() -> None:
    """There was nothing before it."""
    first = (ROOT / "CHANGELOG.md").read_text().rpartition("\n## [0.1.0]")[2]
    assert "### Known limits" in first
    assert re.findall(r"^- (Fixed|\*\*Changed).*", first, re.MULTILINE) == []


def test_the_readmes_first_screen_is_two_commands_and_a_picture() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
    (commands,) = re.findall(r"```sh\n(.*?)```", screen, re.DOTALL)
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["make demo", "make test"]
    assert re.search(r"^!\[.+\]\(docs/pictures/.+\.svg\)$", screen, re.MULTILINE)


def test_the_readmes_code_is_that_of_the_examples() -> None:
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    found = [code for language, code in blocks(ROOT / "README.md") if language == "python"]
    assert found
    for code in found:
        indented = (textwrap.indent(code, " " * depth) for depth in (0, 4, 8))
        assert any(each in example for each in indented for example in examples), code


def test_each_field_of_kv_transfer_params_beside_those_of_others_is_on_the_page_of_vllm() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text().partition("## kv_transfer_params")[2].partition("\n## ")[0]
    of_others = {"remote_engine_id", "remote_block_ids"}
    ours = {field for field in Handoff.model_fields if field.startswith("remote_")} - of_others
    assert ours <= set(re.findall(r"`(\w+)`", page))


def test_a_router_that_is_said_to_run_is_tested() -> None:
    """The last cell of its row names the file and, there, the parameter or the test."""
    rows = re.findall(r"\[run\]\(([^)]+)\): (.+?) \|$", (ROOT / "docs" / "routers.md").read_text(), re.MULTILINE)
    assert rows
    for path in {path for path, _ in rows}:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not long", ROOT / "docs" / path]
        listed = subprocess.run(command, check=True, timeout=280, capture_output=True, text=True, cwd=ROOT).stdout
        for router in (router for of, router in rows if of == path):
            assert f"[{router}]" in listed or f"::{router}\n" in listed, f"{router} is no test of {path}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=name)
def test_a_picture_can_be_read_in_the_dark_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text()
    root = ET.fromstring(text)
    assert root.get("viewBox")
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\(|@import|<script|<image", text)


def test_the_reference_is_that_of_the_sources(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tests" / "generate_reference.py", tmp_path]
    subprocess.run(command, check=True, timeout=120)
    committed = ROOT / "docs" / "reference"
    assert {path.name for path in committed.iterdir()} == {path.name for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        assert (committed / path.name).read_text() == path.read_text(), f"{path.name} is out of date: make reference"


# ---- docs/models.md has the name of every refusal that a pair of its tables can meet ----


TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs/models.md").read_text()
DESCRIBING = ["parts.py", *(f"vllm/{name}.py" for name in ("cells", "heads", "layers", "worker"))]
"""The files of clients/kvferry that describe an engine's cache."""


def table(marker: str) -> list[list[str]]:
    """The rows of a table of the page."""
    text = PAGE.partition(f"<!-- {marker} -->\n")[2].partition("end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert rows, marker
    return rows


def named(where: str) -> set[str]:
    return {row[0].strip("`") for row in table("refusals") if row[1] == where}


def raised(file: Path) -> Iterator[str]:
    """The codes of the errors that a file makes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Malformed":
            assert isinstance(node.args[0], ast.Constant), f"{file}:{node.lineno} has a code that is computed"
            yield node.args[0].value


def test_every_name_that_a_pair_can_be_refused_by_is_on_the_page() -> None:
    assert named("plan") == set(MEANING)


def test_every_name_that_an_engine_can_be_refused_by_at_its_start_is_on_the_page() -> None:
    assert named("start") == {code for name in DESCRIBING for code in raised(TOP / "clients/kvferry" / name)}


def test_the_tables_refuse_by_no_other_name() -> None:
    rows = table("computed: make models") + table("engines: test_vllm_models")
    cells = [cell.removeprefix("refused: ") for row in rows for cell in row if cell.startswith("refused: ")]
    met = {code for cell in cells for code in cell.split(", ")}
    assert met
    assert met <= named("plan") | named("start")
