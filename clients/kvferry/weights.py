"""The weights of an engine that replaces them while it serves, as the plug-ins name them. docs/engines.md says why.

The engine's steps are numbered, and what is to be published names the oldest step that may have computed any of it. A
change comes between two steps, the same two on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from kvferry.blocking import BlockingEngineClient
from kvferry.fingerprint import folder_of
from kvferry.protocol.kept import Latest

KEPT = 4096
"""The content of so many adapters is known, the last that were loaded. An older one is read again."""


class Weights:
    """The weights of one engine rank. Called by the thread that computes."""

    def __init__(self, daemon: BlockingEngineClient, engine: str, say: Callable[..., None]) -> None:
        """engine: names this start of the engine, on all its ranks alike. say: a logger's method."""
        self._daemon, self._engine, self._say = daemon, engine, say
        self._base = self._name = ""
        """The name of the model's weights, and that of all that KV depends on."""
        self._adapters: dict[str, tuple[str, str]] = {}
        """The digests of each adapter's first weights and of its weights now, by name."""
        self.registered = ""
        """The name, by its content, of the checkpoint that the engine registered with; empty where it has none."""
        self.step = 0
        """The last that has begun."""
        self._replaced_at = -1
        """The last step before the last change."""
        self._changes = 0

    def of(self, since: int) -> str:
        """The name of the weights since this step. If they have been replaced meanwhile, a name that the daemon refuses
        (`mixed_weights`)."""
        return f"those before change {self._changes} of {self._engine}" if self.replaced_since(since) else self._name

    def replaced_since(self, step: int) -> bool:
        """Whether other weights may have computed what has been computed since this step."""
        return step <= self._replaced_at

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """They are replaced inside, and have a new name that no other engine knows, also where that fails; until
        `rename` says what they are."""
        self._changes += 1
        self.replaced(f"{self._engine}/{self._changes}")
        yield

    def replaced(self, name: str) -> None:
        """They have been replaced, and are called this. Earlier publishes cannot be read any more."""
        self._replaced_at = self.step
        self.rename(name)

    def rename(self, name: str) -> None:
        """They are the same, and are called this. Publishes under another name cannot be read any more."""
        self._base = name
        again = sorted((adapter, now) for adapter, (first, now) in self._adapters.items() if now != first)
        adapters = f"+lora:{hashlib.sha256(repr(again).encode()).hexdigest()[:32]}" if again else ""
        self._name = f"{name}{adapters}"
        self._say("the weights are called %r now", self._name)
        self._daemon.replace_weights(self._name)

    def reloaded(self, name: str) -> None:
        """They have been replaced by those of a checkpoint. name: by its content; where it has none, they keep the one
        that no other engine knows."""
        if name:
            self.rename("" if name == self.registered else name)

    def adapter_loaded(self, name: str, digest: str) -> None:
        """A LoRA adapter has been loaded. Under a name that had other weights before it is a change."""
        first, before = self._adapters.setdefault(name, (digest, digest))
        if digest != before:
            self._adapters[name] = first, digest
            self.replaced(self._base)


class Adapters:
    """The content of an engine's LoRA adapters, in the process that makes the digests of its prompts."""

    def __init__(self) -> None:
        self._digests: Latest[Hashable, str] = Latest(KEPT)

    def loaded(self, adapter: Hashable, path: str) -> None:
        """The engine has loaded it from there, also where it had another content before. adapter: what the engine
        tells adapters apart by."""
        self._digests.put(adapter, digest_of_adapter(path))

    def digest(self, adapter: Hashable, path: str) -> str:
        """The content that the engine has loaded; of an adapter that it has not loaded yet, what is there now."""
        if (digest := self._digests.get(adapter)) is None:
            digest = digest_of_adapter(path)
            if folder_of(path):  # else it is downloaded when it is loaded
                self._digests.put(adapter, digest)
        return digest


def digest_of_adapter(path: str) -> str:
    """The digest of all files of a LoRA adapter, as they are small; of its name where they are not here."""
    folder = folder_of(path)
    digest = hashlib.sha256(b"" if folder else path.encode())
    for file in sorted(folder.glob("adapter_*") if folder else ()):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
