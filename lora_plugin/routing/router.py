"""From a request to the adapter it is for: the ways of naming, then aliases, then compositions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lora_plugin.errors import AdapterNotFound, BadRequest, Code
from lora_plugin.hooks.builtin.spelling import BASE, spell
from lora_plugin.hooks.manager import HookManager, Named
from lora_plugin.hooks.types import Part, Request, Selection
from lora_plugin.hub.reference import name_of
from lora_plugin.routing.files import RoutingFiles


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        asked: what the client said.
        adapter: an adapter's or composition's name; None for the base model.
        version: a prefix of the wanted version; None for the one that is served.
        parts: of a composition; empty for an adapter.
        fallback: whether the base model answers when it cannot be served.
    """

    asked: str
    adapter: str | None
    version: str | None = None
    parts: tuple[Part, ...] = ()
    fallback: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that are needed for it."""
        if self.parts:
            return tuple(part.adapter for part in self.parts)
        return () if self.adapter is None else (self.adapter,)


class Router:
    """Looks names up; loads nothing, and never takes a name for a path.

    Args:
        hooks: the ways of naming.
        files: aliases and compositions.
        base_models: names that the base model is served under.
    """

    def __init__(self, hooks: HookManager, files: RoutingFiles, base_models: Collection[str]) -> None:
        self._hooks = hooks
        self._files = files
        self._base_models = frozenset(base_models)

    def route(self, request: Request) -> Route:
        """Where the request goes; a weighted alias is drawn here.

        Raises:
            BadRequest: NAME_CONFLICT: two ways name different adapters.
            AdapterNotFound: no way of naming takes what `model` says.
        """
        named = self._hooks.select_adapter(request)
        if not named:
            if request.model and request.model not in self._base_models:
                raise AdapterNotFound.named(request.model)
            return Route(request.model or BASE, None)
        return self._resolve(agreed(named), request)

    def _resolve(self, selection: Selection, request: Request) -> Route:
        asked = spelled(selection)
        fallback = False
        aliased = selection.version is None and not selection.parts and selection.adapter is not None
        if aliased and (alias := self._files.aliases.value.get(str(selection.adapter))) is not None:
            selection, fallback = alias.choose(request), alias.fallback
        # A repository of the Hub has a slash in its name, which no adapter's has.
        adapter = None if selection.adapter is None else name_of(selection.adapter)
        if selection.parts:
            adapter = asked
        route = Route(asked, adapter, selection.version, selection.parts, fallback)
        if route.adapter is None or route.version is not None or route.parts:
            return route
        return replace(route, parts=self._files.compositions.value.get(route.adapter, ()))


def agreed(named: list[Named]) -> Selection:
    """What all of them say; of a version, the longest prefix.

    Raises:
        BadRequest: NAME_CONFLICT: they differ; it names both.
    """
    first, chosen = named[0], named[0].selection
    for other in named[1:]:
        both = _both(chosen, other.selection)
        if both is None:
            raise BadRequest(
                Code.NAME_CONFLICT,
                f"the request names two adapters: {spelled(first.selection)!r} ({first.plugin}) and "
                f"{spelled(other.selection)!r} ({other.plugin})",
                hint="name one; a 'model' that is the base model's name goes with every adapter",
            )
        chosen = both
    return chosen


def spelled(selection: Selection) -> str:
    """A selection in a client's words."""
    if selection.parts:
        return "+".join(map(spell, selection.parts))
    if selection.adapter is None:
        return BASE
    return spell(Part(selection.adapter[:100], selection.version))


def _both(one: Selection, other: Selection) -> Selection | None:
    if (one.adapter, one.parts) != (other.adapter, other.parts):
        return None
    short, long = sorted((one, other), key=lambda selection: len(selection.version or ""))
    return long if (long.version or "").startswith(short.version or "") else None
