"""`make release`: what it makes of a tag, that it makes the same again, and of what it makes nothing."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
INSTALL_S = 700
"""From the network, beside other tests: it is a minute on a machine at rest, and was above five with load 20."""
ROOT = Path(__file__).parents[2]
TOOL = """\
#!/bin/sh
# A tool for containers that says how it is called, and saves something.
echo "$@" >> "$(dirname "$0")/calls"
case "$1" in save) echo saved > "${2#--output=}" ;; esac
"""


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "core.hooksPath=/dev/null")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def tag(folder: Path, version: str = "v0.1.0") -> None:
    """All that the folder has, as the only commit of a repository."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    git(folder, "tag", version)


def cut(folder: Path) -> None:
    """Nothing is left that no version has."""
    path = folder / "CHANGELOG.md"
    path.write_text(re.sub(r"(## \[Unreleased\]\n).*?(?=## \[)", r"\1\n", path.read_text(), flags=re.S))


@functools.cache
def made(folder: Path) -> str:
    """The output of `make release`."""
    command = ["make", "--no-print-directory", "release", f"RELEASE_VENV={ROOT / '.venv-release'}", "IMAGES="]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder dist of this checkout, as if it were 0.1.0."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git's")
    folder = tmp_path_factory.mktemp("release")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    cut(folder)
    tag(folder)
    assert "no images: IMAGES names none" in made(folder)
    return folder / "dist"


def sums(dist: Path) -> dict[str, str]:
    lines = (dist / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


@pytest.mark.slow
def test_all_of_it_is_there_with_its_checksum(release: Path) -> None:
    assert {path.name for path in release.iterdir()} == {*sums(release), "SHA256SUMS"}
    assert sums(release).keys() == {
        "kvferry-0.1.0-py3-none-any.whl", "kvferry-0.1.0.tar.gz", "kvferry-chart-0.1.0.tgz", "notes.md",
        "kvferry-0.1.0-cpu.cdx.json", "kvferry-0.1.0-cuda12.cdx.json", "kvferry-0.1.0-cuda13.cdx.json",
    }  # fmt: skip
    for name, digest in sums(release).items():
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == digest


@pytest.mark.slow
def test_the_same_commit_gives_the_same_bytes(release: Path) -> None:
    before = sums(release)
    for path in release.parent.rglob("*"):
        if (
            ".git" not in path.parts and path.is_file() and path.suffix != ".txt"
        ):  # a lock that is newer is installed anew
            path.touch()
    made.__wrapped__(release.parent)
    assert sums(release) == before


@pytest.mark.slow
def test_wheel_and_source_archive_are_of_the_tag(release: Path) -> None:
    with zipfile.ZipFile(release / "kvferry-0.1.0-py3-none-any.whl") as wheel:
        assert b"\nVersion: 0.1.0\n" in wheel.read("kvferry-0.1.0.dist-info/METADATA")
    with tarfile.open(release / "kvferry-0.1.0.tar.gz") as archive:
        assert {"kvferry-0.1.0/PKG-INFO", "kvferry-0.1.0/SECURITY.md"} <= set(archive.getnames())


@pytest.mark.slow
def test_the_chart_has_the_version_and_can_be_installed(release: Path) -> None:
    engine = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
    with tarfile.open(release / "kvferry-chart-0.1.0.tgz") as packed:
        about = packed.extractfile("kvferry/Chart.yaml")
        assert about is not None
        assert b"\nversion: 0.1.0\nappVersion: 0.1.0\n" in about.read()
    images = {"daemon": "kvferry:0.1.0-cuda13", "proxy": "kvferry:0.1.0-cpu"}
    with (
        engine.Chart.load(str(release / "kvferry-chart-0.1.0.tgz")) as packaged,
        engine.Chart.load(str(ROOT / "deploy" / "helm" / "kvferry")) as chart,
    ):
        same = chart.render({"images": images}, name="pair", namespace="n")
        assert packaged.render({}, name="pair", namespace="n") == same


@pytest.mark.slow
@pytest.mark.parametrize("image", ["cpu", "cuda12", "cuda13"])
def test_the_bill_of_materials_has_every_locked_package(release: Path, image: str) -> None:
    bill = json.loads((release / f"kvferry-0.1.0-{image}.cdx.json").read_text())
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == ("kvferry", "0.1.0")
    locked = re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "deploy/locks" / f"{image}.txt").read_text(), re.MULTILINE)
    assert {(one["name"], one["version"]) for one in bill["components"]} == set(locked)


@pytest.mark.long  # the gate follows all of docs/start.md so
def test_the_wheel_is_installed_as_documented_in_a_fresh_environment(release: Path, tmp_path: Path) -> None:
    """The two commands for a machine without a GPU (docs/start.md) take a minute where packages are at hand."""
    (wheel,) = release.glob("kvferry-0.1.0-*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True, timeout=100)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = functools.partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    for wanted in ([f"{wheel}[daemon]"], ["--no-deps", "nixl-cu13"]):
        installing = [tmp_path / "fresh" / "bin" / "python", "-m", "pip", "install", "--quiet", *wanted]
        assert (done := run(installing, timeout=250)).returncode == 0, done.stderr
    kvferry = tmp_path / "fresh" / "bin" / "kvferry"
    assert run([kvferry, "--version"], timeout=60).stdout == "kvferry 0.1.0\n"
    checked = run([kvferry, "serve", "--check", "--engine-socket", tmp_path / "s"], timeout=60)
    assert checked.returncode == 0 and "wrong" not in checked.stdout, checked.stdout + checked.stderr


@pytest.mark.slow
def test_the_notes_are_what_the_changelog_says_of_the_version(release: Path) -> None:
    notes = (release / "notes.md").read_text()
    assert notes.startswith("The first release")
    assert notes in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkout of the least that make release looks at."""
    folder = tmp_path / "small"
    (folder / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "release.py", folder / "deploy")
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    cut(folder)
    return folder


def unreleased(folder: Path) -> None:
    path = folder / "CHANGELOG.md"
    path.write_text(path.read_text().replace("## [Unreleased]\n", "## [Unreleased]\n- Something.\n"))


@pytest.mark.parametrize(
    ("before", "version", "after", "said"),
    [
        (lambda folder: None, "v0.1.0", lambda folder: (folder / "new").touch(), "the checkout is not clean"),
        (lambda folder: None, "other", lambda folder: None, "this commit has no tag -> git tag"),
        (lambda folder: None, "v0.2.0", lambda folder: None, r"CHANGELOG.md has no section \[0.2.0\]"),
        (unreleased, "v0.1.0", lambda folder: None, r"entries under \[Unreleased\] -> move them to \[0.1.0\]"),
    ],
    ids=["changed", "no-tag", "no-section", "unreleased"],
)
def test_nothing_is_made_of_what_is_no_release(
    small: Path, before: Callable[[Path], None], version: str, after: Callable[[Path], None], said: str
) -> None:
    before(small)
    tag(small, version)
    after(small)
    command = [sys.executable, "deploy/release.py"]
    done = subprocess.run(command, cwd=small, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.search(said, done.stderr)
    assert not (small / "dist").exists()


def test_a_tool_that_fails_is_named_in_one_line(small: Path) -> None:
    tag(small)
    (small / ".git" / "HEAD").unlink()
    done = subprocess.run([sys.executable, "deploy/release.py"], cwd=small, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("make release: this ended with 128: git status --porcelain\n")
    assert "Traceback" not in done.stderr


def test_each_image_is_told_the_version_and_keeps_its_health_check(small: Path, tmp_path: Path) -> None:
    tool = tmp_path / "podman"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    code = "import release; release.DIST.mkdir(); print(repr(release.images('0.1.0')))"
    asked = {"ENGINE_TOOL": str(tool), "IMAGES": "cpu cuda12", "BUILD": "--build-arg=BASE=debian:12"}
    command = [sys.executable, "-c", code]
    where = os.environ | asked | {"SOURCE_DATE_EPOCH": "1", "PYTHONPATH": str(small / "deploy")}
    done = subprocess.run(command, cwd=small, env=where, capture_output=True, text=True, timeout=60)
    assert done.stdout == "''\n", done.stderr
    assert sorted(path.name for path in (small / "dist").iterdir()) == [
        "kvferry-0.1.0-cpu.image.tar", "kvferry-0.1.0-cuda12.image.tar",
    ]  # fmt: skip
    builds = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("build ")]
    assert [("--target=cpu" in line, "CUDA=12" in line) for line in builds] == [(True, False), (False, True)]
    for told in ("--build-arg=VERSION=0.1.0", "--build-arg=BASE=debian:12", "--format=docker"):
        assert all(told in line for line in builds), told


def test_where_no_container_can_be_built_it_is_said(small: Path, tmp_path: Path) -> None:
    code = "import release; print(release.images('0.1.0'))"
    environment = os.environ | {"ENGINE_TOOL": "/nowhere/podman", "PYTHONPATH": str(small / "deploy")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=small, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "neither of /nowhere/podman works here\n"
