"""Generate the protobuf and gRPC stubs of proto/ into a folder: `python tests/generate_stubs.py clients`."""

import os
import sys
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).parent.parent / "proto"


def generate(target: Path) -> None:
    # protoc finds its mypy plug-ins on PATH: those installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    files = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    if protoc.main(["protoc", f"-I{PROTO}", *outputs, *files]) != 0:
        raise SystemExit("protoc failed; its message is above")
    (target / "kvferry/v1/__init__.py").write_text('"""Generated from proto/kvferry/v1 by `make proto`."""\n')


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
