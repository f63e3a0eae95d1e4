"""What pip installs: the wheel, the source archive, the extras, and what is said where an extra is missing."""

from __future__ import annotations

import email
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
    return folder / f"kvferry-{kvferry.__version__}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built(ROOT, "wheel", tmp_path_factory.mktemp("wheel")))


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
