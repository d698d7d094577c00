"""Every hook: when it is called, in which process, what may be returned, what an exception does.

A plugin implements those it needs, with `hookimpl`. For all of them: an exception is logged with the
plugin's name and counts as no answer, so neither a request nor the engine is lost by it; so does an answer of
another type. "First result" means that implementations are asked in order, third-party ones before the
built-in ones, until one returns something other than None; "all" means that every one is called. A plugin may
leave out parameters. Implementations are plain functions or methods: neither async nor pluggy's wrappers.

Every process that has hooks imports every plugin: the API servers, the engine core, the workers. They share
nothing but what a plugin shares by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

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
    from prometheus_client import CollectorRegistry

PROJECT = "lora_plugin"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# Request parsing. On the event loop, unless said otherwise: they must not block.


@hookspec(firstresult=True)
def select_adapter(request: Request) -> Selection | None:
    """Which adapter a request names. First result.

    Process: API server.

    Called once per request, before the name is looked up. None: another way of naming decides; when all say
    None, the request is for the base model if `request.model` is one of its names or empty, else a 404. Where
    no other plugin answers, the built-in ways are all asked: two that name different adapters are a 400.
    """


@hookspec(firstresult=True)
def authorize(request: Request, adapter: str) -> Refusal | None:
    """Whether a request may have an adapter. First refusal; None lets it pass.

    Process: API server.

    Called after the name was selected and before the adapter is looked up or loaded; `adapter` is the
    catalog's name. Requests for the base model are not asked about. The host's endpoint that loads adapters
    asks about the one that it is to give another name. An exception refuses the request with a
    503: access control that fails must not let anyone in.
    """


@hookspec(firstresult=True)
def resolve_source(name: str) -> Source | None:
    """Where an adapter that the catalog does not know may come from. First result.

    Process: API server.

    Called for a valid adapter name, on a thread, once however many requests wait, and not again for some
    seconds after a failure. The folder that the source fetches is put into the watched directory under this
    name and is then like any other. None: nobody knows it, the client gets a 404. After an exception the next
    plugin is asked; where none answers, the client gets a 503.
    """


# Batch construction


@hookspec
def admit(batch_so_far: Sequence[str | None], request: WaitingRequest) -> bool | None:
    """Whether a waiting request may join the step. All; one False keeps it waiting, for this step only.

    Process: engine core.

    Called on the thread that steps, for each waiting request before its adapter is given a place: it must
    take microseconds. `batch_so_far` has the adapter's name (None: base model) of every request in the step;
    it is a view, good for this call only.
    """


@hookspec
def batch_built(batch: Batch) -> None:
    """The rows of the next step are known. All.

    Process: every worker.

    Called before the model runs: it must take microseconds. Not called for warm-up. Nothing is built for it
    where no plugin implements it.
    """


# Linear layers


@hookspec(firstresult=True)
def make_linear(layer: LinearLayer) -> Compute | None:
    """What computes the adapters' share of a layer. First result.

    Process: every worker.

    Called once per layer, when it is wrapped. The answer is called in every step with rows of adapters,
    within the op `torch.ops.lora_plugin.lora_apply`, so that a compiled model calls it too. It must not
    raise: there is no other answer for the step. `layer.compute` is the plugin's own, which it may call. On a
    GPU it is called in every step, and when a CUDA graph is captured instead of when it is replayed. The
    built-in plugin `kernels` answers `layer.compute`; where it is blocked and nobody answers, the start is
    refused.
    """


@hookspec
def linear_observer(layer: LinearLayer) -> Compute | None:
    """What looks at x and y of a layer after the adapters' share was added. All.

    Process: every worker.

    Called once per layer, when it is wrapped; the answers are called as those of `make_linear` are, and must
    change nothing. An observer that raises is logged, and not called again. Nothing is called where nobody
    observes.
    """


# Lifecycle. The first four are told by every API server, on whatever thread noticed, one at a time.


@hookspec
def adapter_discovered(adapter: Adapter) -> None:
    """A folder was seen for the first time. All.

    Process: API server.
    """


@hookspec
def adapter_rejected(adapter: Adapter) -> None:
    """A folder cannot be served; `adapter.reason` says why. All.

    Process: API server.

    It is not served any more, where it was; `adapter.version` is the version that ends so.
    """


@hookspec
def adapter_ready(adapter: Adapter) -> None:
    """A new name, or a new version of one, is served from now on. All.

    Process: API server.

    `adapter.version` is None where nobody needed its digest yet.
    """


@hookspec
def adapter_retired(adapter: Adapter) -> None:
    """A folder is gone, or the operator unloaded it. All.

    Process: API server.

    Told of rejected folders too, when they go.
    """


@hookspec
def adapter_activated(adapter: Adapter) -> None:
    """A version was given rows on the device. All.

    Process: engine core.

    On the thread that steps: it must take microseconds.
    """


@hookspec
def adapter_evicted(adapter: Adapter) -> None:
    """A version lost its rows on the device. All.

    Process: engine core.

    On the thread that steps: it must take microseconds.
    """


# The operator's side, once at the start


@hookspec
def register_metrics(registry: CollectorRegistry) -> None:
    """Add collectors to what `/metrics` exports. All.

    Process: API server with the admin endpoint.

    Each plugin has a registry of its own. Names that begin with `lora_plugin_` are left out. Where another
    plugin has one of the names, all of a plugin's metrics are left out, and said so; where one of them fails
    in a scrape, from that scrape.
    """


@hookspec
def admin_routes() -> Sequence[RouteDef] | None:
    """Further routes of the admin endpoint, behind the same tokens. All.

    Process: API server with the admin endpoint.

    A path must begin with `/x/`; others are left out, and said so. Handlers run on the endpoint's own event
    loop, on a thread of its own.
    """
