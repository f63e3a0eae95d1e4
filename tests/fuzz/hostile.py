"""Words that no client of ours would say: protobuf messages and JSON, made by chance from a seed.

A case begins with something good, where there is something good, and is then changed in a few places: most of what is
wrong everywhere is refused at the first check, and says nothing about the second. Names that the daemon has given are
`known` from its answers, so that a case may name a thing of another kind, or of another owner. The same seed makes the
same cases, but for such names.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
DEEPEST = 4
BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
WHOLE = [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 64, 255, 256, 4095, 4096, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31]
WHOLE += [(1 << 32) - 1, 1 << 32, 1 << 40, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
WHOLE += [-1, -2, -16, -(1 << 31), -(1 << 63)]
FRACTIONS = [0.0, -0.0, 0.001, 0.5, 1.0, -1.0, 1e-300, 5e-324, 86400.0, 86400.5, 1e18, 1e308]
FRACTIONS += [math.nan, math.inf, -math.inf]
TEXTS = ["", "x", " ", "\0", "a\0b", "\n", "\r\n", "../../etc/passwd", "%s%n", "x" * 256, "x" * 257, "x" * 5000]
TEXTS += [
    "é" * 256,
    "\U0001f600" * 64,
    "\x1b[2J",
    "null",
    "0",
    "-1",
    "None",
    "auto",
    "direct",
    "staged",
    "mapped",
    "{}",
]
FREE = frozenset({
    "agent_connection", "axis", "client", "device_uuid", "digest", "dtype", "encoding", "fingerprint", "group",
    "handle", "metadata", "name", "node", "order", "reason", "rest", "traceparent", "ucx", "version", "weights",
    "whole", "x_request_id",
})  # fmt: skip
"""Fields of text or bytes by which nothing is looked up."""
MOST_MET = 16
"""Values of a field that are kept from answers, the newest."""
JSON = [None, True, False, [], {}, [[]], [None], {"": None}, "\ud800", 10**30, -(10**30)]


@dataclass
class Hostile:
    """Makes messages. `known`: values by field name that exist in the daemon under attack; `bounded`: by field name the
    only values that are sent, where others would only take time and memory that anybody may have."""

    rng: random.Random
    known: dict[str, Sequence[Any]] = field(default_factory=dict)
    bounded: dict[str, Sequence[Any]] = field(default_factory=dict)
    _met: dict[str, deque[Any]] = field(default_factory=dict)

    def learn(self, said: Message) -> None:
        """The names in an answer exist in the daemon: from now on they are known."""
        for each, value in said.ListFields():
            for one in [*value.values()] if _is_map(each) else value if each.is_repeated else [value]:
                if isinstance(one, Message):
                    self.learn(one)
                elif each.cpp_type in BITS or each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                    self.know(each.name, one)

    def know(self, name: str, value: Any) -> None:
        met = self._met.setdefault(name, deque(maxlen=MOST_MET))
        if name not in FREE and value not in met:
            met.append(value)

    def unmet(self, *kinds: type[Message]) -> set[str]:
        """Fields of these messages by which something is looked up, and of which no value is known."""
        names: set[str] = set()
        described = [kind.DESCRIPTOR for kind in kinds]
        seen = {each.full_name for each in described}
        for inside in described:  # it grows
            for each in inside.fields:
                if each.message_type is not None and each.message_type.full_name not in seen:
                    seen.add(each.message_type.full_name)
                    described.append(each.message_type)
                if each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                    names |= {each.name} if not inside.GetOptions().map_entry else set()
        return {name for name in names - FREE if not (self.known.get(name) or self._met.get(name))}

    def message(self, kind: type[M], good: Message | None = None) -> M:
        """A new one, or a good one with another name that is known, or changed in one to four places."""
        made = kind()
        if good is None or self.rng.random() < 0.1:
            self._fill(made, 0)
            return made
        made.CopyFrom(good)
        if self.rng.random() < 0.3 and (names := list(self._names(made))):
            inside, each = self.rng.choice(names)
            setattr(inside, each.name, self._scalar(each))
            return made
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            self._change(made, 0)
        return made

    def garbled(self, said: bytes) -> bytes:
        """Bytes that are no message, or another one than they were."""
        rng = self.rng
        match rng.randrange(4):
            case 0:
                return rng.randbytes(rng.choice([1, 2, 3, 8, 40, 300]))
            case 1:
                return said[: rng.randrange(len(said) + 1)]
            case 2:
                return said + rng.randbytes(rng.choice([1, 5, 20]))
        changed = bytearray(said or b"\0")
        for _ in range(rng.choice([1, 2, 4])):
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        return bytes(changed)

    def _names(self, message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
        """The fields by which something is looked up, in the messages that lie in this one."""
        for each in message.DESCRIPTOR.fields:
            if each.message_type is None:
                if not each.is_repeated and (each.name in self.known or self._met.get(each.name)):
                    yield message, each
            elif not _is_map(each):
                held = getattr(message, each.name)
                for inside in held if each.is_repeated else [held] if message.HasField(each.name) else []:
                    yield from self._names(inside)

    def _fill(self, message: Message, depth: int) -> None:
        for each in message.DESCRIPTOR.fields:
            if self.rng.random() < 0.7:
                self._set(message, each, depth)

    def _change(self, message: Message, depth: int) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        each = self.rng.choice(fields)
        if each.message_type is not None and depth < DEEPEST and self.rng.random() < 0.8:
            inside = self._inside(message, each)
            if inside is not None:
                self._change(inside, depth + 1)
                return
        if self.rng.random() < 0.2:
            message.ClearField(each.name)
        else:
            self._set(message, each, depth)

    def _inside(self, message: Message, each: FieldDescriptor) -> Message | None:
        """A message of those that lie in the field."""
        if _is_map(each):
            entries = getattr(message, each.name)
            if not len(entries) or each.message_type.fields_by_name["value"].message_type is None:
                return None
            return entries[self.rng.choice(sorted(entries))]  # type: ignore[no-any-return]
        if each.is_repeated:
            entries = getattr(message, each.name)
            return self.rng.choice(entries) if len(entries) else None
        return getattr(message, each.name) if message.HasField(each.name) else None  # type: ignore[no-any-return]

    def _set(self, message: Message, each: FieldDescriptor, depth: int) -> None:
        if _is_map(each):
            keys, values = (each.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(self.rng.choice([0, 1, 1, 2, 5])):
                key = self._scalar(keys, each.name)
                if values.message_type is None:
                    getattr(message, each.name)[key] = self._scalar(values)
                elif depth < DEEPEST:
                    self._fill(getattr(message, each.name)[key], depth + 1)
            return
        if not each.is_repeated and each.message_type is None:
            setattr(message, each.name, self._scalar(each))
            return
        if each.message_type is None:
            count = self.rng.choice([0, 1, 1, 2, 5, 300])
            message.ClearField(each.name)
            getattr(message, each.name).extend(self._scalar(each) for _ in range(count))
        elif depth >= DEEPEST:
            return
        elif each.is_repeated:
            entries = getattr(message, each.name)
            if len(entries) and self.rng.random() < 0.5:
                entries.add().CopyFrom(self.rng.choice(entries))  # the same twice
            else:
                self._fill(entries.add(), depth + 1)
        else:
            inside = getattr(message, each.name)
            inside.SetInParent()
            self._fill(inside, depth + 1)

    def _scalar(self, each: FieldDescriptor, name: str = "") -> Any:
        name, rng, kind = name or each.name, self.rng, each.cpp_type
        if name in self.bounded:
            return rng.choice(self.bounded[name])
        kin = int if kind in BITS else bytes if each.type == FieldDescriptor.TYPE_BYTES else str
        known = [value for value in (*self.known.get(name, ()), *self._met.get(name, ())) if isinstance(value, kin)]
        if known and rng.random() < 0.6:
            return rng.choice(known)
        if kind in BITS:
            low, high = BITS[kind]
            return rng.choice([number for number in WHOLE if low <= number <= high])
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice(FRACTIONS)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([*each.enum_type.values_by_number, 77, -1])
        if each.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice([0, 1, 8, 32, 64, 65, 5000]))
        return rng.choice(TEXTS)

    def json(self, good: Any) -> Any:
        """A good value changed in one to four places."""
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            good = self._json(good, 0)
        return good

    def _json(self, value: Any, depth: int) -> Any:
        rng = self.rng
        if isinstance(value, Mapping) and value and rng.random() < 0.9:
            changed = dict(value)
            key = rng.choice(sorted(changed))
            match rng.randrange(12):
                case 0:
                    del changed[key]
                case 1:
                    changed[rng.choice(TEXTS)] = changed[key]
                case 2 | 3 | 4 if key in self.known:
                    changed[key] = rng.choice(self.known[key])
                case _:
                    changed[key] = self._json(changed[key], depth + 1)
            return changed
        if isinstance(value, list) and value and rng.random() < 0.85:
            at = rng.randrange(len(value))
            match rng.randrange(12):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return [*value, value[at]]
                case 2:
                    return value * rng.choice([2, 40])
                case _:
                    return [*value[:at], self._json(value[at], depth + 1), *value[at + 1 :]]
        if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.8:
            return rng.choice([*WHOLE, value + 1, value - 1, value * 2, -value, float(value)])
        return rng.choice([*JSON, *WHOLE, *FRACTIONS, *TEXTS])


def _is_map(each: FieldDescriptor) -> bool:
    return each.message_type is not None and each.message_type.GetOptions().map_entry
