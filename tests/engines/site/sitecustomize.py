"""For the Pythons of real engines: who waits in a loop sleeps instead of yielding.

vLLM's processes wait for each other with os.sched_yield for a second at a time. With more of them than cores, Linux
6.18 then leaves other processes, even its own threads, without a core for 20 s and more.

On the CPU their processes are forked. If each imports all of its engine anew, one takes two or three times as long to
start.
"""

import multiprocessing
import os
import time

YIELD_S = 100e-6
os.sched_yield = lambda: time.sleep(YIELD_S)
if "SGLANG_USE_CPU_ENGINE" in os.environ or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
    choose, context = multiprocessing.set_start_method, multiprocessing.get_context
    multiprocessing.set_start_method = lambda _, force=False: choose("fork", force)
    multiprocessing.get_context = lambda _=None: context("fork")
