"""The manifest of one engine rank, read and checked."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

from kvferry.manifest.model import Component, Count, Group, ManifestError, ModelInfo, Name, Part, Position, Region
from kvferry.manifest.rules import check


class Manifest(Part):
    """One engine rank's cache. Build it with `ManifestBuilder`, or read it with `Manifest.from_json`.

    Constructing one directly checks types only; `validated()` checks every rule.
    """

    engine_id: Name
    epoch: Name
    model: ModelInfo
    rank: Position = 0
    world_size: Count = 1
    parallel: dict[str, int] = Field(default_factory=dict)
    regions: Annotated[tuple[Region, ...], Field(min_length=1, max_length=4096)]
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=1024)]
    components: Annotated[tuple[Component, ...], Field(min_length=1, max_length=65536)]

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse and check. Raises ManifestError naming component, field and value."""
        try:
            return cls.model_validate_json(text).validated()
        except ValidationError as error:
            raise _from_pydantic(error) from None

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """The same for parsed JSON."""
        try:
            return cls.model_validate(data).validated()
        except ValidationError as error:
            raise _from_pydantic(error) from None

    def to_json(self) -> str:
        return self.model_dump_json(exclude_none=False)

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def validated(self) -> Manifest:
        """Check every rule; returns self. Raises ManifestError at the first breach."""
        if self.rank >= self.world_size:
            raise ManifestError(
                "rank_out_of_range",
                f"rank {self.rank} does not exist in a world of {self.world_size}",
                field="rank",
                value=self.rank,
                remedy="ranks count from 0 to world_size - 1",
            )
        check(self.regions, self.groups, self.components)
        return self


def _from_pydantic(error: ValidationError) -> ManifestError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "manifest"
    return ManifestError(
        "malformed_manifest",
        f"the manifest is malformed at {field}: {first['msg']}",
        field=field,
        value=first.get("input", ""),
        remedy="docs/protocol.md lists every field of the manifest with an example",
    )
