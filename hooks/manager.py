"""One typed method per hook of `specs`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lora_plugin.hooks.caller import FAILED, Caller, Failed
from lora_plugin.hooks.plugins import find_plugins
from lora_plugin.hooks.types import (
    Adapter,
    Batch,
    Compute,
    LinearLayer,
    Refusal,
    Request,
    Selection,
    Source,
    WaitingRequest,
)

if TYPE_CHECKING:
    from aiohttp.web import RouteDef
    from torch import Tensor

logger = logging.getLogger("lora_plugin.hooks")

_T = TypeVar("_T")
_PREFIX = "/x/"
_UNDECIDED = Refusal("access control failed; try again", 503)


class Named(NamedTuple):
    """A selection and the plugin that made it."""

    plugin: str
    selection: Selection


class HookFailed(Exception):
    """Nobody answered, and an implementation failed: the answer is not known."""


class HookManager(Caller):
    """Calls the hooks; see `specs` for when, and what an answer means."""

    @classmethod
    def load(
        cls, modules: Sequence[str], blocked: Collection[str], builtin: Mapping[str, object]
    ) -> HookManager:
        """The manager of the plugins that are named, installed or built in; see `find_plugins`."""
        return cls(find_plugins(modules, blocked, builtin))

    # Request parsing

    def select_adapter(self, request: Request) -> list[Named]:
        """What the request names: the first third-party answer alone, or that of every built-in way.

        Built-in ways that name different adapters contradict each other: the caller refuses the request.
        """
        named: list[Named] = []
        for implementation, selection in self.answers("select_adapter", Selection, request):
            named.append(Named(implementation.plugin, selection))
            if not implementation.builtin:
                break
        return named

    def authorize(self, request: Request, adapter: str) -> Refusal | None:
        """The first refusal; one with status 503 where an implementation failed."""
        for implementation in self._by_hook["authorize"]:
            refusal: Refusal | Failed | None = self.call(
                implementation, "authorize", Refusal, request, adapter
            )
            if refusal is not None:
                return _UNDECIDED if refusal is FAILED else refusal
        return None

    def resolve_source(self, name: str) -> Source | None:
        """The first answer. Raises HookFailed where there is none and an implementation failed."""
        failed: list[str] = []
        for implementation in self._by_hook["resolve_source"]:
            source: Source | Failed | None = self.call(implementation, "resolve_source", Source, name)
            if source is FAILED:
                failed.append(implementation.plugin)
            elif source is not None:
                return source
        if failed:
            raise HookFailed(f"the plugin {', '.join(failed)} failed")
        return None

    # Batch construction

    def admit(self, batch_so_far: Sequence[str | None], request: WaitingRequest) -> bool:
        """Whether nobody says no."""
        return all(answer for _, answer in self.answers("admit", bool, batch_so_far, request))

    def batch_built(self, batch: Batch) -> None:
        self.tell("batch_built", batch)

    # Linear layers

    def make_linear(self, layer: LinearLayer) -> Compute | None:
        """The first answer; None where nobody has one, the built-in plugin being blocked."""
        first: tuple[object, Compute] | None = next(self.answers("make_linear", Callable, layer), None)
        return None if first is None else first[1]

    def linear_observers(self, layer: LinearLayer) -> tuple[Compute, ...]:
        """All answers, each called until it fails."""
        return tuple(
            _Observer(observe, partial(self.failed, implementation.plugin, "linear_observer"))
            for implementation, observe in self.answers("linear_observer", Callable, layer)
        )

    # Lifecycle

    def adapter_discovered(self, adapter: Adapter) -> None:
        self.tell("adapter_discovered", adapter)

    def adapter_rejected(self, adapter: Adapter) -> None:
        self.tell("adapter_rejected", adapter)

    def adapter_ready(self, adapter: Adapter) -> None:
        self.tell("adapter_ready", adapter)

    def adapter_retired(self, adapter: Adapter) -> None:
        self.tell("adapter_retired", adapter)

    def adapter_activated(self, adapter: Adapter) -> None:
        self.tell("adapter_activated", adapter)

    def adapter_evicted(self, adapter: Adapter) -> None:
        self.tell("adapter_evicted", adapter)

    # The operator's side

    def register_metrics(self, new: Callable[[], _T]) -> list[tuple[str, _T]]:
        """Every plugin's name and registry, with its collectors in it.

        Args:
            new: makes an empty registry; each plugin gets its own, so that none can break another's.
        """
        registries: list[tuple[str, _T]] = []
        for implementation in self._by_hook["register_metrics"]:
            registries.append((implementation.plugin, new()))
            self.call(implementation, "register_metrics", object, registries[-1][1])
        return registries

    def admin_routes(self) -> list[tuple[str, RouteDef]]:
        """Every route with its plugin's name; those outside `/x/` are left out."""
        routes: list[tuple[str, RouteDef]] = []
        for implementation, answer in self.answers("admin_routes", Sequence):
            for route in answer:
                if str(getattr(route, "path", "")).startswith(_PREFIX):
                    routes.append((implementation.plugin, route))
                else:
                    logger.warning(
                        "plugin %r: not a route under %s: %r", implementation.plugin, _PREFIX, route
                    )
        return routes


class _Observer:
    """Calls an observer until it fails."""

    __slots__ = ("_fail", "_observe")

    def __init__(self, observe: Compute, fail: Callable[[Exception], None]) -> None:
        self._observe: Compute | None = observe
        self._fail = fail

    def __call__(self, y: Tensor, x: Tensor) -> None:
        if self._observe is None:
            return
        try:
            self._observe(y, x)
        except Exception as error:
            self._observe = None
            self._fail(error)
