"""Finding plugins and checking them against the specs before anything starts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import pluggy

from lora_plugin.hooks import specs

ENTRY_POINT_GROUP = specs.PROJECT


class PluginError(Exception):
    """A plugin that cannot be used as it is; the message names it, and the hook where there is one."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """Something with hook implementations.

    Attributes:
        name: what the block list and the log call it.
        holder: the module or instance that has them.
        builtin: whether it is one of ours, which are asked after all others.
    """

    name: str
    holder: object
    builtin: bool = False


class Implementation(NamedTuple):
    """One plugin's implementation of one hook; `call` takes all of the spec's parameters, by position."""

    plugin: str
    builtin: bool
    call: Callable[..., Any]


def find_plugins(
    modules: Sequence[str], blocked: Collection[str], builtin: Mapping[str, object]
) -> list[Plugin]:
    """The plugins in the order in which they are asked: modules, entry points by name, built-in ones.

    Args:
        modules: dotted names; a plugin has its module's.
        blocked: names of plugins to leave out, built-in ones too; they are not imported.
        builtin: our own, by name.

    Raises:
        PluginError: one cannot be imported, or a blocked name is no plugin's.
    """
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    known = {*modules, *points, *builtin}
    if unknown := sorted(set(blocked) - known):
        raise PluginError(f"no plugin is named {unknown[0]!r}; there are {', '.join(sorted(known))}")
    loaders: dict[str, Callable[[], object]] = {n: partial(importlib.import_module, n) for n in modules}
    loaders |= {name: points[name].load for name in sorted(points) if name not in loaders}
    third_party = [Plugin(name, _load(name, load)) for name, load in loaders.items() if name not in blocked]
    return third_party + [
        Plugin(n, holder, builtin=True) for n, holder in builtin.items() if n not in blocked
    ]


def implementations(plugins: Sequence[Plugin]) -> dict[str, tuple[Implementation, ...]]:
    """Every hook's implementations in the order in which they are asked.

    The order is that of `plugins`; `tryfirst` and `trylast` move one among the third-party ones.

    Raises:
        PluginError: an implementation of an unknown hook, with other parameters, or of a kind that cannot be
            called one by one; a plugin without any; two of one name.
    """
    manager = pluggy.PluginManager(specs.PROJECT)
    manager.add_hookspecs(specs)
    names = {id(plugin.holder): plugin.name for plugin in plugins}
    try:
        # The one registered last is called first.
        for plugin in reversed(plugins):
            manager.register(plugin.holder, plugin.name)
            _check(plugin, manager)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        name = names.get(id(error.plugin), error.plugin)
        raise PluginError(f"the plugin {name!r} does not fit: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise PluginError(f"a plugin is there twice: {str(error).splitlines()[0]}") from None
    builtin = {plugin.name for plugin in plugins if plugin.builtin}
    return {name: tuple(_ordered(caller, builtin)) for name, caller in _callers(manager)}


def _load(name: str, load: Callable[[], object]) -> object:
    try:
        holder = load()
    except Exception as error:
        raise PluginError(
            f"the plugin {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if inspect.isclass(holder):
        raise PluginError(f"the plugin {name!r} is a class; name an instance of it, or a module")
    return holder


def _check(plugin: Plugin, manager: pluggy.PluginManager) -> None:
    callers = manager.get_hookcallers(plugin.holder)
    if not callers:
        raise PluginError(
            f"the plugin {plugin.name!r} implements no hook; decorate its functions with hookimpl"
        )
    for caller in callers:
        for found in caller.get_hookimpls():
            if found.wrapper or found.hookwrapper or inspect.iscoroutinefunction(found.function):
                raise PluginError(
                    f"the plugin {plugin.name!r} does not fit: {caller.name!r} must be a plain function, "
                    "neither a wrapper nor async"
                )


def _callers(manager: pluggy.PluginManager) -> Iterator[tuple[str, pluggy.HookCaller]]:
    for name, caller in vars(manager.hook).items():
        if isinstance(caller, pluggy.HookCaller) and caller.has_spec():
            yield name, caller


def _ordered(caller: pluggy.HookCaller, builtin: Collection[str]) -> list[Implementation]:
    assert caller.spec is not None
    found = [
        Implementation(
            impl.plugin_name, impl.plugin_name in builtin, _by_position(impl, caller.spec.argnames)
        )
        for impl in reversed(caller.get_hookimpls())
    ]
    return sorted(found, key=lambda implementation: implementation.builtin)


def _by_position(impl: pluggy.HookImpl, parameters: Sequence[str]) -> Callable[..., Any]:
    function: Callable[..., Any] = impl.function
    if tuple(impl.argnames) == tuple(parameters):
        return function
    places = [parameters.index(name) for name in impl.argnames]
    return lambda *args: function(*(args[place] for place in places))
