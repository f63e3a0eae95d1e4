"""docs/start.md, as a newcomer follows it: its commands are run, and say what the page says that they say."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from kvferryd.demo.fleet import Fleet

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280


def steps(page: Path) -> list[tuple[str, str | None]]:
    """(commands, what the page says that they print) of every block that is marked `sh run`."""
    fences = [token for token in MarkdownIt().parse(page.read_text()) if token.type == "fence"]
    following = [*fences[1:], None]
    return [
        (fence.content, after.content if after and after.info == "text" else None)
        for fence, after in zip(fences, following, strict=True)
        if fence.info == "sh run"
    ]


def pattern(said: str) -> str:
    """The page's words, with `...` for what differs from run to run."""
    return ".*?".join(r"\s+".join(map(re.escape, part.split())) for part in said.split("..."))


def follow(page: Path, folder: Path, binaries: Path = Path(sys.executable).parent) -> None:
    """In a shell of its own, with ports and a folder that nobody else has."""
    fleet = Fleet(folder)
    text = {port: str(fleet.free_port()) for port in ("7410", "7411", "7420", "7421")} | {"/tmp/kvferry": str(folder)}
    parts = steps(page)
    assert parts
    script = "set -e\n"
    for number, (commands, _) in enumerate(parts):
        for old, new in text.items():
            commands = commands.replace(old, new)
        script += f"{commands}\necho END-{number}\n"
    environment = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        ["bash"], cwd=ROOT, env=environment, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            out, _ = shell.communicate(script, timeout=TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of it has ended
                os.killpg(shell.pid, signal.SIGKILL)
    begin = 0
    for number, (commands, said) in enumerate(parts):
        mark = f"END-{number}\n"
        assert mark in out[begin:], f"{commands}ended with:\n{out[begin:]}"
        end = out.index(mark, begin)
        if said is not None:
            assert re.search(pattern(said), out[begin:end], re.S), f"{commands}printed:\n{out[begin:end]}"
        begin = end + len(mark)


@pytest.mark.parametrize("page", [ROOT / "docs" / "start.md"], ids=lambda page: page.name)
def test_the_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_can_be_followed_with_a_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    """The pip install that it begins with, of the wheel of a release; from the registry that pip is configured with."""
    dist, fresh, page = tmp_path / "dist", tmp_path / "fresh", ROOT / "docs" / "start.md"
    released = os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": "0.1.0"}
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", dist]
    subprocess.run(build, cwd=ROOT, env=released, check=True, capture_output=True, timeout=60)
    (wheel,) = dist.glob("kvferry-0.1.0-*.whl")
    subprocess.run([sys.executable, "-m", "venv", fresh], check=True, timeout=120)
    installs = re.findall(r"^pip install (.+)$", page.read_text(), re.MULTILINE)
    assert installs == ['".[daemon]"', "--no-deps nixl-cu13"]
    for wanted in ([f"{wheel}[daemon]"], ["--no-deps", "nixl-cu13"]):
        subprocess.run([fresh / "bin" / "pip", "install", "--quiet", *wanted], check=True, timeout=400)
    told = subprocess.run([fresh / "bin" / "kvferry", "--version"], check=True, capture_output=True, timeout=60)
    assert told.stdout == b"kvferry 0.1.0\n"
    follow(page, tmp_path / "run", fresh / "bin")


def test_a_page_that_promises_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh run\necho one two\n```\n```text\none ... three\n```\n")
    with pytest.raises(AssertionError, match=r"printed:\s+one two"):
        follow(page, tmp_path)
