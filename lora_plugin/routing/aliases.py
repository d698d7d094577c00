"""`aliases.yaml`: names for an adapter, a version, the base model, or a weighted choice of them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from lora_plugin.hooks.types import Request, Selection
from lora_plugin.routing.documents import Entry, check_mapping, check_new_name, in_words, read_target

FILE: Final = "aliases.yaml"

Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class AliasEntry(Entry):
    """One entry of the file; a bare target, or a bare mapping of weights, is its `to`.

    Attributes:
        to: a target, or weights by target.
        sticky: a header: requests with the same value of it get the same target.
        fallback: what a request gets when its target cannot be served; None: the reason.
    """

    to: str | dict[str, Weight]
    sticky: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]{1,100}$")
    fallback: Literal["base"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        weights = isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values())
        return {"to": value} if isinstance(value, str) or weights else value

    @field_validator("to")
    @classmethod
    def _check_targets(cls, to: str | dict[str, float]) -> str | dict[str, float]:
        for target in [to] if isinstance(to, str) else to:
            read_target(target)
        if isinstance(to, dict) and not sum(to.values()) > 0:
            raise ValueError("the weights must add up to more than 0")
        return to


@dataclass(frozen=True, slots=True)
class Alias:
    """What a name stands for.

    Attributes:
        name: the alias.
        targets: with their weights, in the file's order.
        sticky: the lower-case name of the header that a choice sticks to.
        fallback: whether the base model answers when a target cannot be served.
    """

    name: str
    targets: tuple[tuple[Selection, float], ...]
    sticky: str | None = None
    fallback: bool = False

    def choose(self, request: Request) -> Selection:
        """The target of a request: by its sticky header, else its `user` field, else at random."""
        if len(self.targets) == 1:
            return self.targets[0][0]
        point = self._point(request) * sum(weight for _, weight in self.targets)
        for target, weight in self.targets:
            point -= weight
            if point < 0:
                return target
        return next(target for target, weight in reversed(self.targets) if weight)

    def _point(self, request: Request) -> float:
        """In [0, 1), the same for the same key; each alias is drawn for itself."""
        key = request.headers.get(self.sticky) if self.sticky else None
        key = key or request.fields.get("user")
        if not isinstance(key, str) or not key:
            return secrets.randbits(53) / (1 << 53)
        digest = hashlib.sha256(f"{self.name}\0{key}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:6]) / (1 << 48)


def parse_aliases(document: object, base_models: Collection[str]) -> Mapping[str, Alias]:
    """The aliases of a file, by name.

    Args:
        document: the file's content.
        base_models: names that the base model is served under.

    Raises:
        ValueError: with the entry and what is wrong with it.
    """
    aliases = {name: _parse(name, raw, base_models) for name, raw in check_mapping(document).items()}
    for alias in aliases.values():
        for target, _ in alias.targets:
            # Its own name means the folder: there are neither chains nor cycles.
            other = target.adapter is not None and target.adapter != alias.name
            if other and target.version is None and target.adapter in aliases:
                raise ValueError(f"{alias.name}: the target {target.adapter!r} is an alias itself")
    return aliases


def _parse(name: str, raw: object, base_models: Collection[str]) -> Alias:
    try:
        check_new_name(name, base_models)
        entry = AliasEntry.model_validate(raw)
    except ValidationError as error:
        raise ValueError(f"{name}: {in_words(error)}") from None
    weights = {entry.to: 1.0} if isinstance(entry.to, str) else entry.to
    return Alias(
        name,
        tuple((read_target(target), weight) for target, weight in weights.items()),
        entry.sticky and entry.sticky.lower(),
        entry.fallback is not None,
    )
