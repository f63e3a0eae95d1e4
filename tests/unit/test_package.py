"""Packages that pip installs: the wheel, the source archive, the extras, what is said where an extra is missing; and
the Makefile, as a newcomer meets it."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvferry

ROOT = Path(__file__).parents[2]
HIDING = """\
import sys
missing, *argv = sys.argv[1:]
sys.modules |= dict.fromkeys(missing.split(","))  # as where they are not installed
from kvferryd.commands.cli import main
sys.exit(main(argv))
"""


def built(source: Path, target: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=60)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built(ROOT, "sdist", folder / "archive")) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("kvferry-*")
    return unpacked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built(ROOT, "wheel", tmp_path_factory.mktemp("wheel")))


def version(source: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "hatchling", "version"]
    done = subprocess.run(
        command, cwd=source, env=os.environ | environment, check=True, capture_output=True, timeout=60
    )
    return done.stdout.decode().strip()


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With the sources' rule for versions, and one commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "one")
    return folder


def test_the_version_is_that_of_the_tag(repository: Path) -> None:
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", version(repository)), "before the first tag: below 0.1.0"
    git(repository, "tag", "v0.1.0")
    assert version(repository) == "0.1.0"
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "two")
    assert re.fullmatch(r"0\.1\.1\.dev1\+g[0-9a-f]+", version(repository))


def test_a_shallow_clone_without_tags_has_a_version(repository: Path, tmp_path: Path) -> None:
    git(repository, "tag", "v0.1.0")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "two")
    git(tmp_path, "clone", "--quiet", "--depth=1", "--no-tags", f"file://{repository}", "shallow")
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", version(tmp_path / "shallow"))


def test_without_git_the_version_is_unknown_unless_it_is_said(tmp_path: Path) -> None:
    """As in an image's build, where VERSION says it, or is empty."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    name = "SETUPTOOLS_SCM_PRETEND_VERSION"
    assert version(tmp_path) == version(tmp_path, **{name: ""}) == "0.0"
    assert version(tmp_path, **{name: "0.1.0"}) == "0.1.0"
    assert f"ARG VERSION=\nRUN {name}=${{VERSION}} " in (ROOT / "Dockerfile").read_text()


def test_a_source_archive_has_the_version_of_its_name(sdist: Path) -> None:
    assert sdist.name == f"kvferry-{version(sdist)}"


def test_what_is_installed_says_its_version() -> None:
    assert kvferry.__version__ == importlib.metadata.version("kvferry")


def test_sources_that_are_not_installed_say_that_they_do_not_know_their_version() -> None:
    code = "import kvferry, sys; assert 'importlib.metadata' not in sys.modules; print(kvferry.__version__)"
    where = {"PYTHONPATH": str(ROOT / "clients")}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=where, capture_output=True, check=True, timeout=60)
    assert done.stdout == b"0.0\n"


def test_the_source_archive_has_all_that_a_checkout_has(sdist: Path) -> None:
    for path in (
        "README.md",
        "Makefile",
        "examples/engine.py",
        "docs/start.md",
        "proto/buf.yaml",
        "deploy/locks/cpu.txt",
    ):
        assert (sdist / path).is_file(), path


def test_the_source_archive_makes_the_same_wheel(sdist: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    assert sorted(zipfile.ZipFile(built(sdist, "wheel", tmp_path)).namelist()) == sorted(wheel.namelist())


def test_the_wheel_has_the_protos_beside_their_stubs(wheel: zipfile.ZipFile) -> None:
    for proto in (ROOT / "proto/kvferry/v1").iterdir():
        assert wheel.read(f"kvferry/v1/{proto.name}") == proto.read_bytes()


def test_only_the_extras_for_gpus_and_the_reference_engine_ask_for_torch(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    told = email.message_from_bytes(wheel.read(metadata))
    assert {"daemon", "cuda12", "cuda13", "bench", "proxy"} <= set(told.get_all("Provides-Extra", []))
    heavy = [line for line in told.get_all("Requires-Dist", []) if line.startswith(("torch", "nixl", "triton"))]
    extras = {line.partition("extra == ")[2].strip("'\"") for line in heavy}
    assert extras == {"cuda12", "cuda13", "reference", "dev"}


@pytest.mark.parametrize("name", kvferry.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(kvferry, name).__name__ == name


@pytest.mark.parametrize(
    ("missing", "argv", "extra"),
    [
        ("structlog", ("serve", "--engine-socket", "/tmp/no.sock"), "daemon"),
        ("structlog", ("bench", "host"), "bench"),
        ("torch", ("bench", "gpu", "--device", "cpu"), "cuda13"),
        ("uvicorn", ("proxy", "--prefill", "http://p", "--decode", "http://d"), "proxy"),
        ("rich", ("demo",), "daemon,reference"),
        ("torch", ("demo",), "daemon,reference"),
        ("tokenizers", ("demo",), "daemon,reference"),
        ("structlog", ("demo",), "daemon,reference"),
    ],
)
def test_a_missing_package_names_the_extra_that_has_it(missing: str, argv: tuple[str, ...], extra: str) -> None:
    done = run_without(missing, *argv)
    assert done.returncode == 2
    assert f"needs the package {missing}, which is not installed -> pip install 'kvferry[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("argv", [("serve", "--engine-socket", "/tmp/no.sock"), ("demo",)], ids=["serve", "demo"])
def test_without_nixl_nothing_starts_and_it_is_said_what_to_install(argv: tuple[str, ...]) -> None:
    done = run_without("nixl_cu13,nixl_cu12,nixl", *argv)
    assert done.returncode == 2
    assert "NIXL is not installed" in done.stderr
    assert "pip install --no-deps nixl-cu13" in done.stderr


def run_without(missing: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDING, missing, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


CLIENT = """\
import importlib, pkgutil, sys
import kvferry
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
for module in pkgutil.iter_modules(kvferry.__path__):
    if module.name not in sys.argv[2].split(","):
        importlib.import_module(f"kvferry.{module.name}")
"""


def test_the_client_needs_nothing_of_the_extras() -> None:
    """An engine's environment has the base install, and torch."""
    requirements = importlib.metadata.requires("kvferry") or []
    extras = {re.split(r"[\[<>=; ]", each)[0].replace("-", "_") for each in requirements if "extra ==" in each}
    for_others = "asgi,page,listening,proxy,reference,sglang,vllm"
    command = [sys.executable, "-c", CLIENT, ",".join(sorted(extras - {"kvferry", "torch"})), for_others]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---- the Makefile, as a newcomer meets it ----


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """make, where pip finds no package."""
    nothing = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = ["make", *arguments, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | nothing, capture_output=True, text=True, timeout=120)


def test_an_environment_that_is_half_made_is_made_anew(tmp_path: Path) -> None:
    """As `python3 -m venv` leaves one where Debian's python3-venv is not installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=60)
    made = make("setup", f"VENV={tmp_path}")
    assert "No module named pip" not in made.stderr
    assert "No matching distribution found for torch" in made.stderr  # pip is there, and has no index here
    assert not (tmp_path / ".ready").exists()


def test_a_folder_that_is_no_environment_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    make("setup", f"VENV={tmp_path}")
    assert (tmp_path / "mine").exists()


def test_what_takes_minutes_says_so_before_it_begins() -> None:
    assert "minutes" in make("--dry-run", "--always-make", "setup").stdout
    assert "half an hour" in make("--dry-run", "--assume-old=.venv/.ready", "test").stdout.partition("-m pytest -")[0]
