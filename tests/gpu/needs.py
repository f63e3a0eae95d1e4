"""Needs of the tests in this folder. Imported first: where there is no GPU or no torch the module is skipped."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Found from here where a file of this folder is a process of its own, too.
sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "integration"))

from kvferry.errors import KvferryError
from kvferry.memory import cuda

try:
    GPUS = cuda.devices()
except KvferryError as error:
    pytest.skip(f"needs a GPU: {error}", allow_module_level=True)
if find_spec("torch") is None:  # not imported: some of the processes that tests start do without it
    pytest.skip("needs torch", allow_module_level=True)
