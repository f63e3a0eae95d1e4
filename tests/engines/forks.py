"""Runs scripts of this folder, each in a fork of a process that has imported an engine. Most take less time than that.

PYTHON tests/engines/forks.py MODULE: a line of JSON names a script, its arguments, and files for what it says and for
its errors; the answer is a line with its status. Ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys

TOLD_S = 360
"""Seconds of a script."""

importlib.import_module(sys.argv[1])
for line in sys.stdin:
    sys.argv, output = json.loads(line)
    if os.fork() == 0:
        break
    print(os.wait()[1], flush=True)
else:
    os._exit(0)
signal.alarm(TOLD_S)
for number, name in enumerate((os.devnull, *output)):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
runpy.run_path(sys.argv[0], run_name="__main__")
