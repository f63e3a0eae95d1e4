"""`kvferry explain`: reads files, explains, and says a refusal with its exit status."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from kvferry.errors import KvferryError, Malformed, Refusal
from kvferry.manifest import Manifest, ManifestError
from kvferry.tables import tables_from_json
from kvferryd.config import resolve
from kvferryd.explain.summary import Bindings, explain_json, source_tables_from_json
from kvferryd.explain.words import explain_text, refusal_text, refused_json

OK, REFUSED = 0, 2
DESCRIPTION = """\
Says who would read what from whom when one destination rank receives from a source engine, and in which runs of
bytes. Needs no daemon. Exits 0 when the two can be paired, 2 when they are refused or a file is not what it should be.

It says what every way is expected to take, and warns when the one that is set (`way`, from --config or KVFERRY_WAY) is
far from the best.

With --transfer it asks the reader's daemon instead: which ways a transfer had, which was taken, what that took, what
was waited for the longest, and which other requests waited for the same in that second.
"""
EXAMPLES = """\
examples:
  kvferry explain --source s0.json --source s1.json --destination d.json
  kvferry explain --source s0.json --destination d.json \\
      --source-tables st.json --destination-tables dt.json --tokens 0:512 --json
  kvferry explain --transfer req-17

A manifest is what GET /v1/engines shows and docs/protocol.md describes. Destination tables are
{"<group>": {"block_ids": [4, 7], "first_token": 0}}; source tables the same by rank, {"<rank>": {"<group>": ...}},
or by group alone for a single source. --tokens 0:512 are tokens 0 to 511 of the request.
"""


class _Parser(argparse.ArgumentParser):
    """argparse exits by itself; a wrong argument is told like everything else that is wrong."""

    def error(self, message: str) -> NoReturn:
        raise Malformed("bad_argument", message, remedy="kvferry explain --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="kvferry explain",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--source", action="append", default=[], metavar="FILE", help="a source rank's manifest; one per rank"
    )
    parser.add_argument("--destination", metavar="FILE", help="the destination rank's manifest")
    parser.add_argument("--source-tables", metavar="FILE", help="block tables of the source ranks")
    parser.add_argument("--destination-tables", metavar="FILE", help="block tables of the destination rank")
    parser.add_argument("--tokens", metavar="A:B", help="global tokens A to B - 1")
    parser.add_argument("--json", action="store_true", help="the plan's summary or, with tables, every run as JSON")
    parser.add_argument(
        "--transfer", metavar="ID", help="a transfer that there was, or its request, or how either begins"
    )
    parser.add_argument("--daemon", metavar="URL", help="who knows of it (default: this machine's daemon)")
    parser.add_argument("--token-file", metavar="FILE", help="the daemon's bearer token, on the first line")
    parser.add_argument("--config", metavar="FILE", help="the daemon's settings; KVFERRY_* variables count as well")
    try:
        parsed = parser.parse_args(arguments)
        _check_flags(parsed)
    except KvferryError as error:
        return _say_wrong(error, as_json="--json" in arguments)
    return explain_command(parsed)


def _check_flags(args: argparse.Namespace) -> None:
    files = [*args.source, *filter(None, (args.destination, args.source_tables, args.destination_tables, args.tokens))]
    if args.transfer is not None and files:
        raise Malformed(
            "bad_argument",
            "--transfer names a past transfer, files describe a possible one",
            field="--transfer",
            value=args.transfer,
            remedy="give one of the two",
        )
    missing = [flag for flag, given in (("--source", args.source), ("--destination", args.destination)) if not given]
    if args.transfer is None and missing:
        raise Malformed(
            "bad_argument",
            f"the following arguments are required: {', '.join(missing)}",
            field=missing[0],
            remedy="give both, or --transfer ID: kvferry explain --help",
        )


def explain_command(args: argparse.Namespace) -> int:
    """Explain parsed arguments (`main` has them); prints to stdout, errors that are no refusal to stderr."""
    try:
        if args.transfer is not None:
            from kvferryd.explain.outcome import explain_transfer  # an HTTP client, which files do not need

            return asyncio.run(explain_transfer(args))
        sources = [_manifest(file, "source") for file in args.source]
        destination = _manifest(args.destination, "destination")
        tables = _tables(args, sources)
        way = resolve({"config": args.config}, only={"way"})[0].way
        if args.json:
            print(json.dumps(explain_json(sources, destination, tables, way=way)))
        else:
            _print(explain_text(sources, destination, tables, way))
    except _InvalidManifest as invalid:
        return _say_refused(invalid.error, [invalid.refusal], as_json=args.json)
    except KvferryError as error:
        if error.refusals:
            return _say_refused(error, error.refusals, as_json=args.json)
        return _say_wrong(error, as_json=args.json)
    return OK


class _InvalidManifest(Exception):
    """A manifest that breaks a rule is a refusal of its side."""

    def __init__(self, error: ManifestError, file: str, side: str) -> None:
        super().__init__(str(error))
        error.message = f"{file}: {error.message}"
        self.error = error
        says = f"{error.field} = {error.value}: {error.message}"
        self.refusal = Refusal(
            error.code, error.component, says if side == "source" else "", says if side == "destination" else ""
        )


def _manifest(file: str, side: str) -> Manifest:
    try:
        return Manifest.from_dict(_read(file, f"--{side}"))
    except ManifestError as error:
        raise _InvalidManifest(error, file, side) from None


def _tables(args: argparse.Namespace, sources: Sequence[Manifest]) -> Bindings | None:
    given = {"--source-tables": args.source_tables, "--destination-tables": args.destination_tables}
    missing = [flag for flag, file in (given | {"--tokens": args.tokens}).items() if file is None]
    if len(missing) == 3:
        return None
    if missing:
        raise Malformed(
            "bad_argument",
            f"{missing[0]} is missing",
            field=missing[0],
            remedy="runs need all of --source-tables, --destination-tables and --tokens; a summary needs none of them",
        )
    return (
        source_tables_from_json(_read(args.source_tables, "--source-tables"), sources, args.source_tables),
        tables_from_json(_read(args.destination_tables, "--destination-tables"), args.destination_tables),
        _token_range(args.tokens),
    )


def _token_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text, re.ASCII)
    if match is None or int(match[1]) > int(match[2]):
        raise Malformed(
            "bad_argument",
            "--tokens is not a range of tokens",
            field="--tokens",
            value=text,
            remedy="write FIRST:LAST, for example 0:512 for tokens 0 to 511",
        )
    return int(match[1]), int(match[2])


def _read(file: str, flag: str) -> Any:
    try:
        return json.loads(Path(file).read_bytes())
    except OSError as error:
        raise Malformed(
            "unreadable_file",
            f"{file} cannot be read: {error.strerror}",
            field=flag,
            value=file,
            remedy="give the path of a JSON file",
        ) from None
    except (ValueError, RecursionError) as error:  # bad JSON and bytes that are not UTF-8
        raise Malformed(
            "malformed_json", f"{file} is not JSON: {error}", field=flag, value=file, remedy="give a JSON file"
        ) from None


def _say_refused(error: KvferryError, refusals: Sequence[Refusal], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(refused_json(refusals)))
    elif error.refusals:
        _print(refusal_text(error))
    else:
        _print(f"refused: {error}")
    return REFUSED


def _say_wrong(error: KvferryError, *, as_json: bool) -> int:
    """Say what is wrong with files, tables or arguments: on stderr for people, on stdout for programs too."""
    _print(f"kvferry: {error}", sys.stderr)
    if as_json:
        about = {name: getattr(error, name) for name in ("code", "message", "field", "value", "remedy")}
        theirs = "source" in error.field or "source" in error.message
        refusal = Refusal(error.code, "", error.message if theirs else "", "" if theirs else error.message)
        print(json.dumps(refused_json([refusal]) | {"error": about}))
    return REFUSED


def _print(text: str, to: TextIO | None = None) -> None:
    """JSON may hold lone surrogates, which no terminal takes, and terminals differ in what they do."""
    out = to or sys.stdout
    encoding = out.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=out)
