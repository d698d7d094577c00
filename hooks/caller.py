"""Calls implementations one by one: one that fails is logged and counted, and costs its own answer only."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final

from lora_plugin.hooks.plugins import Implementation, Plugin, implementations

logger = logging.getLogger("lora_plugin.hooks")


class Failed(Enum):
    """In the place of an answer: the implementation raised, or answered with something else."""

    FAILED = "failed"


FAILED: Final = Failed.FAILED


class Caller:
    """The implementations of every hook.

    Args:
        plugins: in the order in which they are asked, built-in ones last.

    Attributes:
        third_party: the names of those that are not built in.

    Raises:
        PluginError: one of them does not fit the specs.
    """

    def __init__(self, plugins: Sequence[Plugin] = ()) -> None:
        self.third_party = tuple(plugin.name for plugin in plugins if not plugin.builtin)
        self._by_hook = implementations(plugins)
        self._failures: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def has(self, hook: str) -> bool:
        """Whether anybody implements a hook; one without an implementation need not be called."""
        return bool(self._by_hook[hook])

    def plugins(self, hook: str) -> list[str]:
        """The names of those who implement a hook, in the order in which they are asked."""
        return [implementation.plugin for implementation in self._by_hook[hook]]

    @property
    def failures(self) -> dict[tuple[str, str], int]:
        """How often each (plugin, hook) failed in this process."""
        with self._lock:
            return dict(self._failures)

    def failed(self, plugin: str, hook: str, error: BaseException) -> None:
        """Log the first failure of a plugin in a hook, count every one."""
        with self._lock:
            self._failures[plugin, hook] += 1
            first = self._failures[plugin, hook] == 1
        if first:
            logger.warning(
                "plugin %r failed in the hook %r; further failures are only counted",
                plugin,
                hook,
                exc_info=error,
            )

    def call(self, implementation: Implementation, hook: str, kind: Any, *args: Any) -> Any:
        """One implementation's answer, None where it has none, or FAILED.

        Args:
            implementation: which one.
            hook: of which hook.
            kind: the type of an answer, as for `isinstance`.
            args: the spec's parameters.
        """
        try:
            answer = implementation.call(*args)
            if answer is None or isinstance(answer, kind):
                return answer
            raise TypeError(f"its answer is a {type(answer).__name__}, not a {kind.__name__}")
        except (Exception, SystemExit) as error:
            self.failed(implementation.plugin, hook, error)
            return FAILED

    def answers(self, hook: str, kind: Any, *args: Any) -> Iterator[tuple[Implementation, Any]]:
        """The answers of those who have one, asked as the caller goes on."""
        for implementation in self._by_hook[hook]:
            answer = self.call(implementation, hook, kind, *args)
            if answer is not None and answer is not FAILED:
                yield implementation, answer

    def tell(self, hook: str, *args: Any) -> None:
        """Call every implementation; nobody's answer counts."""
        for implementation in self._by_hook[hook]:
            self.call(implementation, hook, object, *args)
