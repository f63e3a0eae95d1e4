"""A plan, or its refusal, in words and small tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvferry.errors import KvferryError, Refusal
from kvferry.manifest import Manifest, TokenShard
from kvferryd.explain.parts import parts
from kvferryd.explain.summary import Bindings, plan_distinct, run_rows, summarise
from kvferryd.explain.ways import taken, ways_text
from kvferryd.plan import Plan, bind
from kvferryd.plan.refused import CANNOT, MEANING, ranges

SIZES_SHOWN = 8
"""Run sizes that are listed; the rest are counted together."""


def explain_text(sources: Sequence[Manifest], destination: Manifest, tables: Bindings | None, way: str = "auto") -> str:
    """The plan in words, with the runs of a request (tables) or of a typical one, and the time that every way would
    take. way: the setting. Raises as `explain_json`."""
    chosen = plan_distinct(sources, destination)
    summary = summarise(chosen)
    head = f"{_name(destination)} reads from {len(chosen.reads_from)} of {len(sources)} source ranks"
    rows = [["rank", "engine", "layers", "components", "share", "bytes/token", "state bytes"]]
    for rank in chosen.reads_from:
        for layers, components, share in _shares(chosen, rank):
            rows.append([str(rank), chosen.sources[rank].engine_id, layers, components, share, "", ""])
        rows[-1][-2:] = [_number(summary.bytes_per_token[rank]), _number(summary.state_nbytes[rank])]
    lines = [head, "", *table(rows, right=(0, 5, 6)), ""]
    bound = summary.bound if tables is None else bind(chosen, *tables)
    sizes = summary.run_nbytes.tolist() if tables is None else [run[-1] for run in run_rows(bound)]
    own = taken(way, chosen, bound)
    if tables is None:
        nbytes = _number(sum(summary.bytes_per_token.values()))
        lines += [
            f"a long request in scattered blocks: {nbytes} bytes and {summary.descriptors_per_token:.4g} runs a token,",
            f"half of the bytes in runs of {_number(summary.run_bytes)} bytes or more; way: {own}",
            "",
            *_sizes(sizes),
        ]
    else:
        first, last = tables[2]
        lines += [
            f"tokens {first} to {last} (excluded): {_number(sum(sizes))} bytes"
            f" in {_number(len(sizes))} runs; way: {own}",
            "",
            *_sizes(sizes),
        ]
    if sizes:
        what = "these tokens" if tables else f"the {_number(sum(sizes))} bytes above"
        lines += ["", *ways_text(way, chosen, bound, what)]
    return "\n".join(line.rstrip() for line in lines).rstrip()


def refusal_text(error: KvferryError) -> str:
    """A refusal as people read it: every reason once, with both values, the components it hits, and the remedy."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for refusal in error.refusals:
        reasons.setdefault((refusal.code, refusal.source, refusal.destination), []).append(refusal.component)
    lines = [CANNOT]
    for (code, source, destination), components in reasons.items():
        meaning, remedy = MEANING.get(code, (code, error.remedy))
        where = f" ({_some(components)})" if any(components) else ""
        lines += ["", f"{code}: {meaning}{where}", f"  source       {source}", f"  destination  {destination}"]
        lines += [f"  -> {remedy}"]
    return "\n".join(lines)


def refused_json(refusals: Iterable[Refusal]) -> dict[str, Any]:
    return {
        "refused": [
            {"code": r.code, "component": r.component, "source": r.source, "destination": r.destination}
            for r in refusals
        ]
    }


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns of equal width, two spaces apart, the first row as their heads; those in `right` aligned right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _shares(chosen: Plan, rank: int) -> list[tuple[str, str, str]]:
    """(layers, components, share) of what is read from a rank."""
    said = []
    for share, layers, components, _ in parts(chosen):
        if share.source_rank == rank:
            whole = not share.axis or share.span == (0, share.total)
            tokens = _tokens(share.group.token_shard)
            part = "all" if whole else f"{share.axis} {share.span} of {share.total}"
            said.append((ranges(layers), ", ".join(components), f"{part}, {tokens}" if tokens else part))
    return said


def _tokens(shard: TokenShard) -> str:
    if shard.size == 1:
        return ""
    return f"tokens of shard {shard.rank} of {shard.size}, {shard.interleave} at a time"


def _sizes(run_nbytes: Sequence[int]) -> list[str]:
    if not run_nbytes:
        return ["  nothing is moved"]
    counts = Counter(run_nbytes)
    biggest = sorted(counts, key=lambda size: size * counts[size], reverse=True)
    rows = [["run bytes", "runs", "of all bytes"]]
    for size in sorted(biggest[:SIZES_SHOWN], reverse=True):
        rows.append([_number(size), _number(counts[size]), f"{size * counts[size] / sum(run_nbytes):.1%}"])
    rest = biggest[SIZES_SHOWN:]
    if rest:
        share = sum(size * counts[size] for size in rest) / sum(run_nbytes)
        rows.append([f"{len(rest)} others", _number(sum(counts[size] for size in rest)), f"{share:.1%}"])
    return table(rows, right=(0, 1, 2))


def _name(manifest: Manifest) -> str:
    return f"{manifest.engine_id} rank {manifest.rank} of {manifest.world_size}"


def _some(components: Sequence[str], most: int = 6) -> str:
    rest = len(components) - most
    return ", ".join(components[:most]) + (f" and {rest} more" if rest > 0 else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
