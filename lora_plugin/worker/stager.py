"""Adapters in host memory: a background thread reads, checks and packs them; steps only copy.

The thread mostly waits for the process that packs (`packing.py`). What it does itself runs beside the steps:
off the cores that the worker is pinned to, with one compute thread and at a lower priority.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lora_plugin.adapter.base_model import BaseModel
from lora_plugin.adapter.join import check_part, join
from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.aside import cores, step_aside
from lora_plugin.composition import PartSource, parts_of
from lora_plugin.errors import Code, LoraPluginError, Reason, unexpected
from lora_plugin.layout import ModelLayout
from lora_plugin.worker.host_memory import HostMemory
from lora_plugin.worker.load_spans import LoadSpan
from lora_plugin.worker.load_times import LoadTimes, Stage

logger = logging.getLogger("lora_plugin")


@dataclass(frozen=True, slots=True)
class Job:
    """One adapter to stage.

    Attributes:
        adapter_id: under which id it is asked for.
        name: its name, for logs and errors.
        path: its folder, or a composition's parts.
        digest: the version that it must be; empty when any content will do.
    """

    adapter_id: int
    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the staging of one adapter stands: neither packed nor refused means under way.

    Attributes:
        packed: the adapter, once it is.
        reason: why it is refused.
        job: what was asked for.
        seconds: how long the load took.
    """

    packed: PackedAdapter | None = None
    reason: Reason | None = None
    job: Job | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for RPC."""
        if self.reason is not None:
            return {"state": "failed", "reason": self.reason.to_dict()}
        if self.packed is None:
            return {"state": "staging"}
        return {
            "state": "ready",
            "rows": self.packed.rows,
            "nbytes": self.packed.nbytes,
            "seconds": self.seconds,
        }


_Jobs = queue.SimpleQueue[tuple[Job, LoadSpan, float] | tuple[()] | None]
"""What the thread does next: jobs, with where and since when; () to look what is forgotten; None to end."""
_AT_EXIT_SECONDS = 2.0


class Stager:
    """The host cache of one worker and the thread that fills it.

    Args:
        layout: the model's layers with this rank's shards.
        max_bytes: a larger adapter is refused unread.
        base: the base model's weights, which DoRA, trained biases and tokens are relative to.
        host: where packed adapters are put, on a GPU; None leaves them where they were packed.
        times: where the stages of a load are noted.
        loader: how a folder becomes a packed adapter, as `adapter.load.load` does.
    """

    def __init__(
        self,
        layout: ModelLayout,
        max_bytes: int,
        base: BaseModel | None,
        *,
        host: HostMemory | None = None,
        loader: Callable[..., PackedAdapter] = load,
        times: LoadTimes | None = None,
    ) -> None:
        self._times = times or LoadTimes(torch.device("cpu"))
        self._layout = layout
        self._max_bytes = max_bytes
        self._host = host
        self._base = base
        self._loader = loader
        self._outcomes: dict[int, Outcome] = {}
        self._spans: dict[int, LoadSpan] = {}
        self._jobs: _Jobs = queue.SimpleQueue()
        self._forgotten: list[Outcome] = []
        # Torch aborts a process whose end catches a thread in it: that waits, but not for a load that hangs.
        self._working = threading.Lock()
        atexit.register(self._working.acquire, timeout=_AT_EXIT_SECONDS)
        self._thread: threading.Thread | None = None
        # Who lets go of the stager (an engine within a program that lives on) ends its thread.
        weakref.finalize(self, self._jobs.put, None)

    def stage(self, job: Job) -> None:
        """Start to stage an adapter, unless that is done or under way; a refused one is tried again."""
        outcome = self._outcomes.get(job.adapter_id)
        if outcome is not None and outcome.reason is None:
            return
        self._outcomes[job.adapter_id] = Outcome(job=job)
        span = self._spans[job.adapter_id] = LoadSpan(job.name, job.digest)
        self._ensure_thread()
        self._jobs.put((job, span, time.monotonic()))

    def outcome(self, adapter_id: int) -> Outcome | None:
        """How the staging stands; None when it was never asked for, or is forgotten."""
        if not self._jobs.empty():
            self._ensure_thread()
        return self._outcomes.get(adapter_id)

    def packed(self, adapter_id: int) -> PackedAdapter:
        """A staged adapter.

        Raises:
            LoraPluginError: INTERNAL when it is not staged.
        """
        outcome = self._outcomes.get(adapter_id)
        if outcome is None or outcome.packed is None:
            raise LoraPluginError(Code.INTERNAL, f"adapter {adapter_id} is to be loaded but is not staged")
        return outcome.packed

    @contextmanager
    def copying(self, adapter_id: int) -> Iterator[PackedAdapter]:
        """Around the copy of a staged adapter to the device, whose bytes stay until that is done.

        Raises:
            LoraPluginError: INTERNAL when it is not staged.
        """
        packed = self.packed(adapter_id)
        with self._spans[adapter_id].copying():
            yield packed
            if self._host is not None:
                self._host.copied(packed)

    def forget(self, adapter_id: int) -> None:
        """Drop an adapter's host copy."""
        outcome = self._outcomes.pop(adapter_id, None)
        self._spans.pop(adapter_id, None)
        if outcome is not None and outcome.packed is not None:
            # To give memory back takes as long as to copy it: the thread does, before the next job.
            self._forgotten.append(outcome)
            self._jobs.put(())

    def relative(self) -> set[int]:
        """The adapters that were made of the base model's weights, or may be: those under way."""
        return {
            adapter_id
            for adapter_id, outcome in list(self._outcomes.items())
            if outcome.reason is None and (outcome.packed is None or outcome.packed.relative)
        }

    def close(self) -> None:
        """End the thread after the job at hand."""
        self._jobs.put(None)

    def _ensure_thread(self) -> None:
        # A thread that died (out of memory while handling out of memory) is replaced.
        if self._thread is None or not self._thread.is_alive():
            work = (weakref.ref(self), self._jobs)
            self._thread = threading.Thread(target=_work, args=work, name="lora-stager", daemon=True)
            self._thread.start()

    def _do(self, job: Job, span: LoadSpan, since: float) -> None:
        started = time.monotonic()
        if not self._is_current(job):
            return
        span.stage(Stage.QUEUE, started - since)
        # What is left when not even a failure can be handled, and this thread dies of it.
        outcome = Outcome(reason=Reason(Code.INTERNAL, "the stager ended", hint="try again"))
        try:
            outcome = self._load(job)
        finally:
            seconds = time.monotonic() - started
            if self._is_current(job):
                self._outcomes[job.adapter_id] = replace(outcome, seconds=seconds)
        self._times.add(Stage.QUEUE, started - since)
        self._times.add(Stage.PACK, seconds)
        span.stage(Stage.PACK, seconds)
        span.end(outcome.reason, outcome.packed)
        if outcome.reason is not None:
            logger.warning("adapter '%s' was not staged: %s", job.name, outcome.reason)
        elif outcome.packed is not None:
            logger.info(
                "staged adapter '%s': rank %d, %.1f MB in %.0f ms",
                job.name,
                outcome.packed.rank,
                outcome.packed.nbytes / 1e6,
                seconds * 1e3,
            )

    def _give_back(self) -> None:
        self._forgotten.clear()
        if self._host is not None:
            self._host.reclaim()

    def _is_current(self, job: Job) -> bool:
        """Whether the job is still wanted: not forgotten, nor forgotten and asked for anew."""
        outcome = self._outcomes.get(job.adapter_id)
        return outcome is not None and outcome.job is job

    def _load(self, job: Job) -> Outcome:
        try:
            packed = self._pack(job)
            if self._host is not None:
                packed = self._host.adopt(packed)
        except LoraPluginError as error:
            return Outcome(reason=error.reason)
        except Exception as error:
            # Whatever a file can provoke ends this adapter's load, not the thread.
            logger.exception("staging adapter '%s' failed", job.name)
            return Outcome(reason=unexpected(error))
        return Outcome(packed=packed)

    def _pack(self, job: Job) -> PackedAdapter:
        parts = parts_of(job.path) if job.digest else ()
        if not parts:
            return self._read(job.path, job.digest)
        return join([self._read_part(part) for part in parts])

    def _read_part(self, part: PartSource) -> PackedAdapter:
        try:
            return check_part(self._read(part.path, part.digest, factor=part.weight))
        except LoraPluginError as error:
            message = f"its part {Path(part.path).name!r}: {error.reason.message}"
            raise type(error).of(replace(error.reason, message=message)) from error

    def _read(self, path: str, digest: str, **options: Any) -> PackedAdapter:
        folder = Path(path)
        return self._loader(
            folder.parent,
            folder.name,
            self._layout,
            digest or None,
            self._max_bytes,
            base=self._base,
            # No digest: named by the operator's own code (offline), not by the catalog.
            trusted=not digest,
            **options,
        )


def _work(owner: weakref.ref[Stager], jobs: _Jobs) -> None:
    """What the thread does, until its stager is let go."""
    # Inherited from the worker's thread: the cores that steps are computed on.
    step_aside(cores())
    while (queued := jobs.get()) is not None and (stager := owner()) is not None:
        with stager._working:
            stager._give_back()
            if queued:
                stager._do(*queued)
            del queued, stager
