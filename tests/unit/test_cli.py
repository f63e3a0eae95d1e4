"""`kvferry`: help that teaches, errors on stderr, exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.schemas import ErrorBody, SourceBody, TransferRecord, TransferState
from kvferryd.commands import cli, say, transfers
from kvferryd.commands.cli import FORWARDED, main
from kvferryd.config import OPTIONS

ANYWHERE = ("--rest", "127.0.0.1:0", "--peer", "127.0.0.1:0", "--advertise", "127.0.0.1:9")
"""Ports that the kernel chooses: a daemon of this machine may have the usual ones."""
OWN = ("serve", "doctor", "status", "top", "transfers", "leases", "history", "peers", "drain")


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OPTIONS, "config"):
        monkeypatch.delenv(f"KVFERRY_{name.upper()}", raising=False)
    return


def run(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def test_help_lists_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert all(command in said for command in (*OWN, *FORWARDED))
    assert "examples:" in said


def test_the_bare_command_is_a_question_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert "examples:" in capsys.readouterr().out


def test_a_drain_is_begun_watched_or_cancelled_and_not_two_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("drain", "--status", "--cancel") == 2
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kvferry dr", "drain"), ("kvferry drain --ca", "--cancel"), ("kvferry serve --arena", "--arena-mb")],
)
def test_the_shell_completes_commands_flags_and_settings(typed: str, offered: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(told), "_ARGCOMPLETE_IFS": "|"}
    subprocess.run([sys.executable, "-m", "kvferryd"], env=os.environ | asked, capture_output=True, check=True)
    assert offered in [each.strip() for each in told.read_text().split("|")]


@pytest.mark.parametrize("command", OWN)
def test_help_of_each_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "host", "keep"])
def test_help_of_what_starts_daemons_says_where_their_settings_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help") == 0
    said = capsys.readouterr().out
    assert "`kvferry serve --help`" in said
    assert "--engine-socket PATH" not in said  # `host` refuses it


def test_help_needs_nothing_but_the_standard_library_and_ours() -> None:
    heavy = "{'torch', 'nixl_cu12', 'nixl_cu13', 'fastapi', 'structlog', 'grpc', 'numpy', 'httpx', 'pydantic'}"
    script = f"import sys; from kvferryd.commands.cli import _parser; _parser(); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "kvferryd", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvferry ")


def test_a_wrong_setting_is_told_on_stderr_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--way", "quick") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "kvferry: way from flag --way is none of the choices (way = 'quick') -> write auto, direct, staged or mapped\n"
    )


def test_check_prints_every_setting_and_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--check", "--arena-mb", "9", *ANYWHERE, "--rest", "0.0.0.0:0") == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines() if line.startswith("arena_mb")] == [
        ["arena_mb", "9", "flag", "--arena-mb"]
    ]
    assert "note: REST listens on 0.0.0.0:0 and takes requests without a token" in said


def test_check_refuses_a_peer_port_that_is_open_to_strangers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--check", "--peer", "0.0.0.0:7411", "--advertise", "10.0.0.7:7411") == 2
    said = capsys.readouterr().err
    assert "peer from flag --peer is open to other hosts" in said
    assert "-> set peer_secret_file, or tls_cert, tls_key and tls_ca" in said


@pytest.mark.parametrize("command", ["status", "top", "transfers", "leases", "peers", "drain"])
def test_a_daemon_that_does_not_answer_exits_2_with_a_remedy(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--daemon", "127.0.0.1:9") == 2
    said = capsys.readouterr().err
    assert "no daemon answers at http://127.0.0.1:9" in said
    assert "->" in said


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("transfers", "--state", "moving"), "--state"),
        (("peers", "--prewarm", "prefill"), "--prewarm"),
        (("peers", "--prewarm", "prefill@here"), "--prewarm"),
        (("status", "--token-file", "/not/there"), "token_file"),
    ],
)
def test_a_bad_argument_exits_2_and_is_named(
    argv: tuple[str, ...], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv, "--daemon", "127.0.0.1:9") == 2
    assert field in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("history", "--hours", "25"), "argument --hours: 25 is not from 1 to 24"),
        (("host", "--cpu", "65"), "argument --cpu: 65 is not from 1 to 64"),
        (("host", "--cpu", "two"), "argument --cpu: two is not from 1 to 64"),
        (("bench", "cots"), "there is no part cots: choose from plan, "),
        (("bench", "cots"), "fleet, cost, paged, trace"),
        (("explain",), "-> give both, or --transfer ID"),
    ],
)
def test_a_bad_argument_is_told_what_would_be_a_good_one(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    assert said in capsys.readouterr().err


def test_a_missing_package_names_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.FORWARDED, "bench", cli.Forwarded("needs_nixl", "", "daemon"))
    assert run("bench") == 2
    assert "pip install 'kvferry[daemon]'" in capsys.readouterr().err


def test_a_forwarded_command_gets_its_own_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "an_other_command.py").write_text("def main(argv):\n    print(argv)\n    return 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.FORWARDED, "explain", cli.Forwarded("an_other_command", "", "daemon"))
    assert run("explain", "--help", "x") == 5
    assert capsys.readouterr().out == "['--help', 'x']\n"


def test_without_transfers_the_daemon_that_has_them_is_named() -> None:
    assert "the daemon that reads lists them" in transfers.transfer_table([])


def test_transfers_are_a_table_with_the_unfinished_first() -> None:
    source = SourceBody(engine_id="prefill", address="h:1")
    ended = TransferRecord(
        transfer_id="1", request_id="old\x1b[2J", engine_id="decode", source=source, state=TransferState.FAILED,
        error=ErrorBody(code="deadline", message="too late"), created_at=time.time(), attempt=0,
    )  # fmt: skip
    live = TransferRecord(
        transfer_id="2", request_id="new", engine_id="decode", source=source, state=TransferState.READING,
        bytes=3 << 30, path="staged", bytes_per_s=2 << 30, attempt=7, lease=12,
        phases_ms={"waiting": 1, "reading": 1500}, created_at=time.time() - 1.5,
    )  # fmt: skip
    lines = transfers.transfer_table([ended, live]).splitlines()
    numbers, what = ["ATTEMPT", "LEASE"], ["FROM", "TO", "PATH", "BYTES", "RATE", "TOTAL", "WAITED", "BEGAN", "ERROR"]
    assert lines[0].split() == ["STATE", "REQUEST", *numbers, *what]
    began = time.strftime("%m-%d %H:%M:%S", time.localtime(live.created_at))
    moved = ["prefill", "decode", "staged", "3.0", "GiB", "2.0", "GiB/s", "1.5", "s", "1.0", "ms"]
    assert lines[1].split() == ["reading", "new", "7", "12", *moved, *began.split()]
    assert lines[2].split()[2:4] == ["-", "-"], "neither is known yet"
    assert "deadline: too late" in lines[2]
    assert "\x1b" not in lines[2]


def test_in_a_pipe_no_cell_is_cut_or_broken() -> None:
    lines = say.table(("ID", "ERROR"), [("a", "why " * 100), ("[b]", "")], "none").splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [["ID", "ERROR"], ["a", ("why " * 100).strip()], ["[b]"]]


@pytest.mark.parametrize(("nbytes", "said"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB")])
def test_sizes_are_for_people(nbytes: int, said: str) -> None:
    assert say.size(nbytes) == said


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_an_error_in_a_line(flags: tuple[str, ...], unbuffered: str) -> None:
    """Neither a traceback nor 1, which means that something is wrong on the machine."""
    command = [sys.executable, "-m", "kvferryd", "serve", "--check", "--engine-socket=/tmp/check.sock", *ANYWHERE]
    if flags:
        command = [sys.executable, "-m", "kvferryd", "doctor", "--engine-socket=/tmp/check.sock", *flags]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            check=False, timeout=120,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "kvferry: [Errno 28] No space left on device\n")


def test_top_ends_after_a_number_of_looks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("top", "--times", "-1") == 2
    assert "argument --times" in capsys.readouterr().err
