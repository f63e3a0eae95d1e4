"""Text to tokens and back: the checkpoint's tokenizer.json, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from kvferry.errors import Malformed
from kvferry.reference.config import ModelSource


def tokenizer_of(source: ModelSource) -> Tokenizer:
    path = source.checkpoint / "tokenizer.json" if source.checkpoint else None
    return HuggingFaceTokenizer(path) if path and path.is_file() else ByteTokenizer(source.config.vocab_size)


class ByteTokenizer:
    """A token per byte of UTF-8. 256 begins a text, 257 ends one, and a token of 258 or more, which only an untrained
    model utters, reads as <258>. The vocabulary has to have 258 tokens for prompts in text."""

    BEGIN, END = 256, 257

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        if self._vocab_size <= self.END:
            raise Malformed(
                "malformed_request", f"a vocabulary of {self._vocab_size} tokens has no room for bytes",
                field="prompt", remedy="send the prompt as token ids",
            )  # fmt: skip
        return [self.BEGIN, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        named = (bytes([t]) if t < self.BEGIN else b"" if t <= self.END else f"<{t}>".encode() for t in tokens)
        return b"".join(named).decode(errors="replace")


class HuggingFaceTokenizer:
    """The checkpoint's own, with the special tokens that it adds."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Loader

        self._tokenizer = Loader.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


Tokenizer: TypeAlias = ByteTokenizer | HuggingFaceTokenizer


class TextStream:
    """Turns a growing list of tokens into pieces of text that never have to be taken back: half a character and
    what may become a stop string are kept until more is known."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._sent = 0

    def feed(self, tokens: Sequence[int], *, last: bool) -> str:
        """The text that is now certain and was not returned before."""
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens)
        end = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=-1)
        if end >= 0:
            text = text[:end]
        elif not last:
            text = text.rstrip("\ufffd")
            text = text[: len(text) - max((_overhang(text, stop) for stop in self._stop), default=0)]
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        return piece

    def stops(self, generated: Sequence[int]) -> bool:
        text = self._tokenizer.decode(generated)
        return any(stop in text for stop in self._stop)


def _overhang(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
