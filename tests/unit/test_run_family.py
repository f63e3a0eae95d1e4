"""The two processes of `kvferry run`: whichever is ended, and when, the other one takes away what was made."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from kvferryd.run import family
from kvferryd.run.family import DIES_S, UPGRADES
from kvferryd.run.shared import MEMORY, Watch, remove
from support import refused

PLANS = """\
import os, shutil, signal, sys
from kvferryd.run.family import guarded

def work(folder):
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells)  # a signal that comes right before the wait ends it
    print(folder, os.getpid(), flush=True)
    os.read(told, 1)
    return 0

sys.exit(guarded("kvferry-test-", work, lambda folder: shutil.rmtree(folder, ignore_errors=True)))
"""


@contextmanager
def planning(before: Callable[[], object] | None = None) -> Iterator[tuple[subprocess.Popen[str], Path, int]]:
    """The first process, the folder, and the number of the second, which has not begun to handle signals."""
    with subprocess.Popen([sys.executable, "-c", PLANS], stdout=subprocess.PIPE, text=True, preexec_fn=before) as first:
        try:
            assert first.stdout is not None
            folder, second = first.stdout.readline().split()
            assert Path(folder).is_dir()
            yield first, Path(folder), int(second)
        finally:
            first.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_planning_leaves_no_folder(number: signal.Signals) -> None:
    with planning(lambda: signal.signal(number, signal.SIG_DFL)) as (first, folder, _):
        first.send_signal(number)
        assert first.wait(30) == 128 + number
        assert not folder.exists()


def test_the_first_has_no_handlers_that_a_signal_could_reach_right_before_it_waits() -> None:
    with planning() as (first, *_):
        said = dict(line.split(":\t") for line in Path(f"/proc/{first.pid}/status").read_text().splitlines())
        caught = int(said["SigCgt"], 16)
        assert not any(caught >> number - 1 & 1 for number in (signal.SIGTERM, signal.SIGHUP, UPGRADES))


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_process_that_is_killed_during_planning_leaves_no_folder(which: str) -> None:
    with planning() as (first, folder, second):
        other = psutil.Process(second)
        os.kill(first.pid if which == "first" else second, signal.SIGKILL)
        first.wait(30)
        other.wait(30)
        assert not folder.exists()


def test_nohup_keeps_it_from_the_end_of_its_terminal() -> None:
    with planning(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (first, folder, _):
        first.send_signal(signal.SIGHUP)
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 128 + signal.SIGTERM
        assert not folder.exists()


UNKILLABLE = """\
import os, sys
from kvferryd.run import family
family.CLEANS_S = family.DIES_S = 0.05
if os.fork() == 0:
    print(sorted(family.end(lambda: {1}, 0.0)), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_process_that_the_kernel_does_not_end_is_given_up() -> None:
    """The first process of a PID namespace cannot be killed from within."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces")
    command = [*apart, sys.executable, "-c", UNKILLABLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "[1]\n", done.stderr


REUSED = """\
import subprocess
from kvferryd.run import family

def begun():
    return subprocess.Popen(["sleep", "600"])

ours, looks = begun(), 0
stranger = None

def left():
    global looks, stranger
    looks += 1
    if looks == 2:  # the last look before it is killed; it ends right after that
        ours.kill()
        ours.wait()
        while stranger is None or stranger.pid != ours.pid:
            with open("/proc/sys/kernel/ns_last_pid", "w") as last:
                last.write(str(ours.pid - 1))
            stranger = begun()
    return {ours.pid} if looks <= 2 else set()

family.end(left, 0.0)
print("the stranger has ended:", stranger.poll(), flush=True)
"""


def test_a_number_that_is_another_process_by_now_is_not_killed() -> None:
    """In a PID namespace, where the test says which number comes next."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    last = ["sh", "-c", "echo 300 > /proc/sys/kernel/ns_last_pid"]
    if subprocess.run([*apart, *last], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces, or choose numbers in them")
    done = subprocess.run(
        [*apart, sys.executable, "-c", REUSED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "the stranger has ended: None\n", done.stderr


def test_what_is_deaf_is_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and select.select([process.stdout], [], [], 30)[0]
        left = family.end(lambda: {process.pid} if process.poll() is None else set(), 0.0)
        assert (left, process.wait()) == (set(), -signal.SIGKILL)


def test_whoever_looks_takes_no_status_of_a_child_away() -> None:
    with subprocess.Popen(["false"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.pid not in family.living(os.getpid())
        family.reap(spared={process.pid})
        assert process.wait() == 1


def test_orphans_that_have_ended_are_reaped() -> None:
    with subprocess.Popen(["false"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        family.reap(spared=set())
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
        process.returncode = 1


SAYS = """\
import os, shutil, sys
from pathlib import Path
from kvferryd.run.family import guarded

def work(folder):
    if sys.stdout is not None:
        print("planned")
    return 3

status = guarded("kvferry-test-", work, lambda folder: shutil.rmtree(folder, ignore_errors=True))
with Path(sys.argv[1]).open("a") as told:
    told.write(f"{status}\\n")
"""


@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
def test_the_second_process_ends_in_its_work_also_where_its_words_cannot_be_written(
    stdout: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    command = ["sh", "-c", f'exec "$0" -c "$1" "$2" {stdout}', sys.executable, SAYS, str(told)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=buffered)
    assert "Traceback" not in done.stderr
    assert told.read_text() == "3\n", "the first process alone goes on, with the status of the second"


LATE = """\
import os, shutil, signal, sys
from kvferryd.run import family

ignore = signal.signal
def late(number, handler):
    if handler is signal.SIG_IGN and os.getpid() == first:
        os.kill(first, number)  # just before it is ignored
    return ignore(number, handler)

first = os.getpid()
signal.signal = late
sys.exit(family.guarded("kvferry-test-", lambda folder: 5, lambda folder: shutil.rmtree(folder, ignore_errors=True)))
"""


def test_a_signal_that_comes_as_the_second_process_ends_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (5, "")


@pytest.mark.parametrize("where", ["long", "nowhere"])
def test_a_folder_that_cannot_have_sockets_is_refused_by_name(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 80)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None if where == "long" else str(tmp_path / "nowhere"))
    with refused("no_folder", field="TMPDIR"):
        family.guarded("kvferry-test-", lambda folder: 0, lambda folder: None)
    assert not [*long.iterdir()]


STOPS = """\
import asyncio, os, sys, tempfile
from pathlib import Path
from kvferryd.run import children

DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w'); signal.pause()"

async def main():
    children.AGAIN_S = 0.2
    with tempfile.TemporaryDirectory() as folder:
        async with children.Children("run", ["deaf"], Path(folder), os.environ, as_json=False) as living:
            os.mkfifo(heard := f"{folder}/deaf")
            deaf = living.start("deaf", [sys.executable, "-c", DEAF, heard], {})
            await asyncio.to_thread(Path(heard).read_text)
            living.told.set_result(15)
            living.hurried.set_result(15)
            await living.stop(float(sys.argv[1]), deaf)
            print("it ended:", deaf.ended.done() and deaf.ended.result(), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("patience_s", [0.2, DIES_S, 3.0])
def test_a_second_signal_cuts_short_the_first_wait_alone(patience_s: float) -> None:
    """However long that would have been: what is killed then is waited for, or its status is not known."""
    command = [sys.executable, "-c", STOPS, str(patience_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "it ended: -9" in done.stdout, done.stdout + done.stderr
    assert "left behind" not in done.stdout


NO_INTERPRETER = """\
import asyncio, os, sys, tempfile
from pathlib import Path
from kvferryd.host.plan import plan
from kvferryd.run import children

def opened():
    return len(os.listdir("/proc/self/fd"))

async def main():
    with tempfile.TemporaryDirectory() as folder:
        (daemon,) = plan({}, {}, folder=folder, gpus=(), cpus=1)
        async with children.Children("host", ["daemon-0"], Path(folder), os.environ, as_json=False) as living:
            before, sys.executable = opened(), f"{folder}/python"
            try:
                living.keep(daemon)
            except FileNotFoundError:
                print("files left open:", opened() - before, flush=True)

asyncio.run(main())
"""


def test_a_keeper_that_cannot_be_started_leaves_nothing_open() -> None:
    """The interpreter is being replaced: `kvferry host` tries again and again."""
    done = subprocess.run(
        [sys.executable, "-c", NO_INTERPRETER], capture_output=True, text=True, timeout=60, check=False
    )
    assert "files left open: 0\n" in done.stdout, done.stdout + done.stderr


# ---- shared memory with a name: what one of our processes made is taken away, and nothing else ----


MAKES = """\
import mmap, os, sys
path = "/dev/shm/" + sys.argv[1]
file = os.open(path, os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 4096)
mapped = mmap.mmap(file, 4096)
os.close(file)
print("made", flush=True)
sys.stdin.read()
"""


@contextmanager
def making(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has made this file, and has it open until the end."""
    command = [sys.executable, "-c", MAKES, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "made\n"
        yield process
        process.kill()


@pytest.fixture
def name(tmp_path: Path) -> Iterator[str]:
    name = f"kvferry-test-{tmp_path.name}"
    yield name
    (MEMORY / name).unlink(missing_ok=True)


@pytest.mark.parametrize("ours", [True, False])
def test_what_ours_made_is_taken_away(tmp_path: Path, name: str, ours: bool) -> None:
    made = set[int]()
    with closing(Watch(tmp_path, lambda: made)) as watch:
        with making(name) as process:
            if ours:
                made.add(process.pid)
            assert select.select([watch.fd], [], [], 10)[0]
            watch.made()
        remove(tmp_path)
    assert (MEMORY / name).exists() is not ours


def test_another_file_of_the_same_name_stays(tmp_path: Path) -> None:
    memory = SharedMemory(create=True, size=16)
    try:
        (tmp_path / memory.name).write_text("1")
        remove(tmp_path)
        assert (MEMORY / memory.name).exists()
    finally:
        memory.close()
        memory.unlink()
    remove(tmp_path / "not there")


def test_what_another_process_has_open_stays(tmp_path: Path, name: str) -> None:
    with making(name):
        (tmp_path / name).write_text(str((MEMORY / name).stat().st_ino))
        remove(tmp_path)
        assert (MEMORY / name).exists()
    remove(tmp_path)
    assert not (MEMORY / name).exists()
