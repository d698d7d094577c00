"""Finding plugins, the order in which they are asked, and what one that fails costs."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hook_samples import plugin, selecting

from lora_plugin.errors import SettingsError
from lora_plugin.extensions.loading import load_hooks
from lora_plugin.hooks import (
    Adapter,
    Batch,
    LinearLayer,
    Refusal,
    Request,
    Selection,
    WaitingRequest,
    hookimpl,
    specs,
)
from lora_plugin.hooks import plugins as finding
from lora_plugin.hooks.builtin import BUILTIN
from lora_plugin.hooks.manager import HookFailed, HookManager, Named
from lora_plugin.hooks.plugins import Plugin, PluginError
from lora_plugin.settings import Settings, load_settings

HOOKS = [name for name, function in vars(specs).items() if hasattr(function, f"{specs.PROJECT}_spec")]
LAYER = LinearLayer("model.layers.0.mlp.down_proj", "linear", 8, (8,), lambda y, x: None)
EVENTS = ("discovered", "rejected", "ready", "retired", "activated", "evicted")


def everything(answer: Callable[..., Any]) -> Plugin:
    """One that implements every hook, with all parameters, by `answer(hook, *args)`."""
    module = ModuleType("everything")
    for hook in HOOKS:
        parameters = ", ".join(inspect.signature(getattr(specs, hook)).parameters)
        namespace: dict[str, Any] = {"answer": answer, "hook": hook}
        exec(f"def {hook}({parameters}): return answer(hook, {parameters})", namespace)
        setattr(module, hook, hookimpl(namespace[hook]))
    return Plugin("everything", module)


def call_all(hooks: HookManager) -> dict[str, Any]:
    """Every hook called once, with what it answered."""
    adapter, request = Adapter("poet"), Request("poet")
    answers: dict[str, Any] = {
        "select_adapter": hooks.select_adapter(request),
        "authorize": hooks.authorize(request, "poet"),
        "admit": hooks.admit((None,), WaitingRequest("1", "poet", 3, 0.0)),
        "make_linear": hooks.make_linear(LAYER),
        "linear_observer": hooks.linear_observers(LAYER),
        "register_metrics": hooks.register_metrics(list),
        "admin_routes": hooks.admin_routes(),
    }
    hooks.batch_built(Batch(("poet",), (0,), (1,)))
    for event in EVENTS:
        getattr(hooks, f"adapter_{event}")(adapter)
    try:
        answers["resolve_source"] = hooks.resolve_source("poet")
    except HookFailed:
        answers["resolve_source"] = HookFailed
    return answers


def test_every_hook_is_called_with_its_parameters() -> None:
    seen: dict[str, tuple[Any, ...]] = {}
    call_all(HookManager([everything(lambda hook, *args: seen.__setitem__(hook, args))]))
    assert seen.keys() == set(HOOKS)
    assert seen["authorize"] == (Request("poet"), "poet")
    assert seen["admit"] == ((None,), WaitingRequest("1", "poet", 3, 0.0))


@pytest.mark.parametrize("answer", [ZeroDivisionError("boom"), "an answer of no hook's type"])
def test_a_failure_costs_the_answer_of_its_plugin_only(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(hook: str, *args: Any) -> object:
        if isinstance(answer, Exception):
            raise answer
        return 7 if hook == "admin_routes" else answer

    called: list[str] = []

    def adapter_ready(adapter: Adapter) -> None:
        called.append(adapter.name)

    hooks = HookManager(
        [everything(fail), plugin("other", adapter_ready), Plugin("kernels", BUILTIN["kernels"], True)]
    )
    with caplog.at_level(logging.WARNING, "lora_plugin.hooks"):
        answers = [call_all(hooks) for _ in range(3)][-1]
    refusal = answers.pop("authorize")
    assert isinstance(refusal, Refusal)
    assert refusal.status == 503
    assert answers.pop("register_metrics") == [("everything", [])]
    assert answers == {
        "select_adapter": [],
        "admit": True,
        "make_linear": LAYER.compute,
        "linear_observer": (),
        "admin_routes": [],
        "resolve_source": HookFailed,
    }
    assert called == ["poet"] * 3
    asked = set(HOOKS) if isinstance(answer, Exception) else {hook for _, hook in hooks.failures}
    assert hooks.failures == dict.fromkeys([("everything", hook) for hook in asked], 3)
    assert len(caplog.records) == len(asked)
    assert all("'everything'" in record.message and record.exc_info for record in caplog.records)


def test_third_party_selections_win_and_built_in_ones_are_all_asked() -> None:
    ours = [selecting("field", "a", True), selecting("header", None, True), selecting("suffix", "b", True)]
    asked = Request("x")
    assert HookManager(ours).select_adapter(asked) == [
        Named("field", Selection("a")),
        Named("suffix", Selection("b")),
    ]
    theirs = [selecting("first", None), selecting("second", "c"), selecting("third", "d")]
    assert HookManager([*theirs, *ours]).select_adapter(asked) == [Named("second", Selection("c"))]


def test_trylast_moves_among_the_third_party_ones_only() -> None:
    @hookimpl(trylast=True)
    def select_adapter(request: Request) -> Selection:
        return Selection("late")

    late = ModuleType("late")
    late.select_adapter = select_adapter  # type: ignore[attr-defined]
    hooks = HookManager([Plugin("late", late), selecting("early", None), selecting("ours", "a", True)])
    assert hooks.plugins("select_adapter") == ["early", "late", "ours"]


def test_parameters_may_be_left_out_and_instances_are_plugins() -> None:
    class Tenants:
        @hookimpl
        def authorize(self, adapter: str) -> Refusal | None:
            return Refusal("no") if adapter == "secret" else None

    hooks = HookManager([Plugin("tenants", Tenants())])
    assert hooks.authorize(Request("secret"), "secret") == Refusal("no", 403)
    assert hooks.authorize(Request("open"), "open") is None


def test_one_no_keeps_a_request_waiting() -> None:
    def admit(batch_so_far: Sequence[str | None]) -> bool:
        return "poet" not in batch_so_far

    hooks = HookManager([plugin("a", admit)])
    waiting = WaitingRequest("1", "poet", 3, 0.0)
    assert hooks.admit((), waiting)
    assert not hooks.admit(("poet",), waiting)


def test_an_observer_that_fails_is_not_called_again() -> None:
    calls: list[str] = []

    def bad(y: Any, x: Any) -> None:
        calls.append("bad")
        raise ValueError("boom")

    def linear_observer(layer: LinearLayer) -> Any:
        return bad

    hooks = HookManager([plugin("watcher", linear_observer)])
    (observe,) = hooks.linear_observers(LAYER)
    for _ in range(3):
        observe(None, None)  # type: ignore[arg-type]
    assert calls == ["bad"]
    assert hooks.failures == {("watcher", "linear_observer"): 1}


def test_a_refusal_has_a_status_that_refuses() -> None:
    with pytest.raises(ValueError, match="200"):
        Refusal("come in", 200)


async def _async(adapter: Adapter) -> None: ...


def _wrapper(adapter: Adapter) -> Iterator[None]:
    yield


def _unknown(path: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (_async, {"specname": "adapter_ready"}, "'adapter_ready' must be a plain function"),
        (
            _wrapper,
            {"specname": "adapter_ready", "wrapper": True},
            "'adapter_ready' must be a plain function",
        ),
        (_unknown, {"specname": "adapter_redy"}, "unknown hook 'adapter_redy'"),
        (_unknown, {"specname": "adapter_ready"}, "hook 'adapter_ready'.*'path'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    function: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    module = ModuleType("odd")
    module.function = hookimpl(**options)(function)  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=f"'odd'.*{words}"):
        HookManager([Plugin("odd", module)])


def test_a_plugin_without_hooks_or_twice_is_refused() -> None:
    with pytest.raises(PluginError, match="'empty' implements no hook"):
        HookManager([Plugin("empty", ModuleType("empty"))])
    once = selecting("once", "a")
    with pytest.raises(PluginError, match="twice"):
        HookManager([once, Plugin("again", once.holder)])


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes importable modules."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(name: str, text: str) -> None:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in names:
        sys.modules.pop(name, None)


READY = "from lora_plugin.hooks import hookimpl\n@hookimpl\ndef adapter_ready(adapter): ...\n"


def settings(tmp_path: Path, **fields: Any) -> Settings:
    return Settings(adapter_dir=tmp_path, **fields)


def test_modules_come_before_entry_points_and_blocked_ones_are_not_imported(
    modules: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("hooks_b", "hooks_a", "hooks_point"):
        modules(name, READY)
    modules("hooks_broken", "raise RuntimeError('boom')")
    points = EntryPoints(
        EntryPoint(name, module, finding.ENTRY_POINT_GROUP)
        for name, module in (("point", "hooks_point"), ("broken", "hooks_broken"))
    )
    monkeypatch.setattr(finding, "entry_points", lambda group: points)
    with pytest.raises(SettingsError, match="'broken' cannot be imported: RuntimeError: boom"):
        load_hooks(settings(tmp_path))
    hooks = load_hooks(settings(tmp_path, hooks="hooks_b, hooks_a", hooks_block="broken"))
    assert hooks.plugins("adapter_ready") == ["hooks_b", "hooks_a", "point"]
    assert load_hooks(settings(tmp_path, hooks_block="broken,point,kernels")).plugins("make_linear") == []


def test_names_that_are_no_plugins_refuse_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no plugin is named 'kernel'; there are .*kernels"):
        load_hooks(settings(tmp_path, hooks_block="kernel"))
    # Blocked for good measure, where no repository is allowed anyway.
    load_hooks(settings(tmp_path, hooks_block="hub"))
    with pytest.raises(SettingsError, match="'no_such_module' cannot be imported"):
        load_hooks(settings(tmp_path, hooks="no_such_module"))


@pytest.mark.parametrize("value", ["my-hooks", "a b", "a,,b", ".a", "hooks.py/x", ","])
def test_what_is_no_module_name_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match=r"LORA_PLUGIN_HOOKS has a value.*names of Python modules"):
        load_settings({"LORA_PLUGIN_ADAPTER_DIR": str(tmp_path), "LORA_PLUGIN_HOOKS": value})


def test_without_plugins_only_the_built_in_ones_are_there(tmp_path: Path) -> None:
    hooks = load_hooks(settings(tmp_path))
    built_in = {name for hook in HOOKS for name in hooks.plugins(hook)}
    assert built_in <= set(BUILTIN)
    assert not any(
        hooks.has(hook) for hook in ("admit", "batch_built", "linear_observer", "adapter_activated")
    )
