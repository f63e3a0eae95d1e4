"""Mutants of the protocol: one small change of a machine each, which rules of the machines have to find, known seeds
of the simulated worlds, or the unit tests of the machines.

`make mutants` draws 300 by a seed and lists those that survive. A survivor is an oracle that is missing, code that
nothing needs, or a change that changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import itertools
import multiprocessing
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy  # noqa: F401  loaded once, before each mutant's process is made
import pytest

PACKAGE = "kvferry.protocol"
SILENT = {"check", "sizes", "__str__", "__repr__"}
"""Methods that the worlds call, or people read."""
CPU_S = 10.0
"""A run that takes longer hangs."""
TESTS = Path(__file__).parents[1]
RULES = "test_machine_rules", "test_requests", "test_rules_between_daemons", "test_attempt_rules"
"""Rules of the machines themselves, by events: a second for all."""
UNIT = (
    "bounds_of_all", "chunk_stream", "fences", "gather", "lease", "retired", "roster_joinings",
    "served_stream", "states",
)  # fmt: skip
"""Other tests of the machines, which those play that neither rules nor worlds find."""
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
NEXT: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
"""The comparison that differs where both sides are equal."""
Place = tuple[ast.AST, str, int | None]
Mutant = tuple[str, int, str, int]
"""Module, line, what it says, and which change of the module it is."""


class Hangs(BaseException):
    pass


def places(node: ast.AST) -> Iterator[tuple[Place, ast.AST]]:
    """Everything that may be changed, with where it stands: no annotation, no text of an error."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise | ast.Assert):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.FunctionDef) and child.name in SILENT:
                continue
            if isinstance(child, ast.keyword) and child.arg == "repr":
                continue
            yield (node, name, index), child
            yield from places(child)


def changes(node: ast.AST, fields: bool) -> Iterator[ast.AST]:
    """fields: whether the node stands in the body of a class."""
    match node:
        case ast.Compare(ops=[op]):
            for table in (OPPOSITE, NEXT):
                if type(op) in table:
                    yield ast.Compare(node.left, [table[type(op)]()], node.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            for index in range(len(node.values)):
                left = node.values[:index] + node.values[index + 1 :]
                yield ast.BoolOp(node.op, left) if len(left) > 1 else left[0]
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.BinOp(op=ast.Add()):
            yield ast.BinOp(node.left, ast.Sub(), node.right)
        case ast.BinOp(op=ast.Sub()):
            yield ast.BinOp(node.left, ast.Add(), node.right)
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.List(elts=[_, *_]):
            for index in range(len(node.elts)):
                yield ast.List(node.elts[:index] + node.elts[index + 1 :], node.ctx)
            for index in range(len(node.elts) - 1):
                yield ast.List(
                    [*node.elts[:index], *reversed(node.elts[index : index + 2]), *node.elts[index + 2 :]], node.ctx
                )
        case ast.If() if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield ast.If(ast.Constant(True), node.body, node.orelse)
            yield ast.If(ast.Constant(False), node.body, node.orelse)
        case ast.Raise() | ast.Delete() | ast.AugAssign():
            yield ast.Pass()
        case ast.Expr(value=ast.Call(func=ast.Name("assert_never"))):
            pass
        case ast.Expr(value=ast.Call() | ast.YieldFrom()):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not fields:
            yield ast.Pass()
        case _:
            pass


def said(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0][:100]


def changed(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Node and what stands in its place, until the next is asked for."""
    for (parent, name, index), node in list(places(tree)):
        for change in changes(node, isinstance(parent, ast.ClassDef)):
            at = getattr(parent, name) if index is not None else parent
            where: int | str = index if index is not None else name
            put = at.__setitem__ if isinstance(at, list) else lambda key, value, at=at: setattr(at, key, value)
            put(where, change)
            yield node, change
            put(where, node)


def mutants(path: Path) -> Iterator[Mutant]:
    for number, (node, change) in enumerate(changed(ast.parse(path.read_text()))):
        yield path.stem, getattr(node, "lineno", 0), f"{said(node)}  ->  {said(change)}", number


def source(path: Path, number: int) -> str:
    tree = ast.parse(path.read_text())
    next(itertools.islice(changed(tree), number, None))
    return ast.unparse(ast.fix_missing_locations(tree))


def replaced(module: str, number: int) -> None:
    spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
    assert spec is not None and spec.origin is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    exec(compile(source(Path(spec.origin), number), f"{module}.py", "exec"), made.__dict__)


def hang(signum: int, frame: FrameType | None) -> None:
    raise Hangs


def used(seeds: int) -> dict[str, set[str]]:
    """By world: the modules that it runs."""
    from simulate import WORLDS, Found, played

    modules: dict[str, set[str]] = {world: set() for world in WORLDS}
    for world, seen in modules.items():
        sys.setprofile(lambda frame, *_, seen=seen: seen.add(frame.f_globals["__name__"]))
        for seed in range(seeds):
            played(seed, Found(world))
        sys.setprofile(None)
    return modules


def broken() -> str:
    """The first rule that does not hold; empty if all do."""
    for module in map(importlib.import_module, RULES):
        for name, rule in vars(module).items():
            if name.startswith("test_"):
                try:
                    rule()
                except (Exception, pytest.fail.Exception):  # noqa: BLE001  a machine that breaks is found, too
                    return name
    return ""


def failing() -> str:
    """The first unit test that fails; empty if none does."""
    said = io.StringIO()
    files = [str(next(TESTS.glob(f"*/test_{name}.py"))) for name in UNIT]
    with contextlib.redirect_stdout(said):
        failed = pytest.main(["-qx", "-p", "no:cacheprovider", *files])
    return (
        next((line for line in said.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))), "a unit test")
        if failed
        else ""
    )


def unchanged() -> str:
    """The rule or test that fails though nothing is changed, and would find every mutant; empty if all is well."""
    signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, 6 * CPU_S)
    try:
        return broken() or failing()
    except Hangs:
        return "the unit tests take too long"


def fate(job: tuple[Mutant, list[str], int]) -> str:
    """How it is found; empty if it survives."""
    (module, _, _, number), worlds, seeds = job
    signal.signal(signal.SIGVTALRM, hang)
    try:
        replaced(module, number)
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        if rule := broken():
            return rule
        from simulate import Found, played

        for seed in range(seeds):
            for world in worlds:
                signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
                if kind := played(seed, Found(world)):
                    return f"{world} {seed}: {kind}"
        signal.setitimer(signal.ITIMER_VIRTUAL, 6 * CPU_S)
        return failing()
    except Hangs:
        return "hangs"
    except Exception as error:  # noqa: BLE001  it cannot be loaded
        return f"not loaded: {error!r}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants")
    parser.add_argument("--seeds", type=int, default=400, help="runs of each world that a mutant has to survive")
    parser.add_argument("--most", type=float, default=0.05, help="share that may survive")
    parser.add_argument("--only", default="", help="one module")
    asked = parser.parse_args()
    package = importlib.util.find_spec(PACKAGE)
    assert package is not None
    assert package.origin is not None
    found = Counter[bool]()
    sys.path.append(str(TESTS / "unit"))
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        if failed := pool.apply(unchanged):
            sys.exit(f"without any change: {failed}")
        runs = pool.apply(used, (2,))
        paths = sorted(Path(package.origin).parent.glob(f"{asked.only or '*'}.py"))
        every = [mutant for path in paths for mutant in mutants(path)]
        drawn = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
        jobs = [
            (each, [name for name, seen in runs.items() if f"{PACKAGE}.{each[0]}" in seen], asked.seeds)
            for each in drawn
        ]
        print(f"{len(drawn)} of {len(every)} mutants, {asked.seeds} seeds", flush=True)
        for ((module, line, what, _), *_), how in zip(jobs, pool.imap(fate, jobs), strict=True):
            found[bool(how)] += 1
            print(f"{'found' if how else 'SURVIVES'} {module}.py:{line}: {what}   {how}", flush=True)
    print(f"{found[True]} found, {found[False]} survive")
    return found[False] > asked.most * len(drawn)


if __name__ == "__main__":
    sys.exit(main())
