"""Install a real SGLang for the CPU, and its router, into the virtual environment of the Python that runs this.

    python -m venv .venv-sglang && .venv-sglang/bin/python tests/engines/install_sglang.py [VERSION]

SGLang from the package index is built for CUDA. It is installed without its requirements, and those that a dense text
model needs on a CPU by name. Its CPU kernels are on no index: tests/engines/sgl_kernel.py stands in for them. About
3 GB.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from install import CHECKOUT, TORCH, pip, requirements

VERSION = "0.5.23"
ROUTER = "sglang-router==0.3.2"
NOT_NEEDED = {
    "anthropic", "av", "blobfile", "build", "cuda-python", "datasets", "decord2", "deepseek-recipe", "flash-attn-4",
    "flashinfer-python", "humming-kernels", "kernels", "modelscope", "nvidia-cutlass-dsl", "nvidia-mathdx",
    "nvidia-ml-py", "nvshmem4py-cu13", "py-spy", "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla",
    "sglang-kernel", "smg-grpc-servicer", "tilelang", "timm", "tml-renderers", "torch", "torch-memory-saver",
    "torchaudio", "torchcodec", "torchvision",
}  # fmt: skip
ALSO = ("cloudpickle", "dill")
"""Packages that it imports and gets from those."""


def main(version: str = VERSION) -> None:
    pip("torch", TORCH, "packaging")
    pip(f"sglang {version}", f"sglang=={version}", "--no-deps")
    pip("its requirements", TORCH, *ALSO, *requirements("sglang", NOT_NEEDED))
    pip("torchvision, for its Python", "torchvision", "--no-deps")
    pip("its router", ROUTER)
    pip("nixl, for SGLang's own backend", "nixl", "nixl-cu13", "--no-deps")
    pip("kvferry, the client", "--editable", str(CHECKOUT))
    packages = Path(sysconfig.get_path("purelib"))
    # It registers operations that are compiled for another torch, and ends the import where they are missing.
    (packages / "torchvision" / "_meta_registrations.py").write_text("")
    (packages / "sgl_kernel").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("sgl_kernel.py"), packages / "sgl_kernel" / "__init__.py")


if __name__ == "__main__":
    main(*sys.argv[1:])
