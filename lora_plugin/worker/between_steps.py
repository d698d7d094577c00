"""Work that only the thread of the steps may do, handed to it by another: a little between steps.

Base layers may keep state between calls (a oneDNN product, a kernel's workspace), so that a second thread
that used them during a step would spoil the step's numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from lora_plugin.adapter.base_model import Task


class BetweenSteps:
    """Tasks in the order in which they were handed in."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Task, Future[Tensor]]] = deque()

    def run(self, tasks: Sequence[Task]) -> list[Tensor]:
        """The tasks' results; called by another thread, waits for as many calls of `advance` as it takes.

        Raises:
            Exception: what the first task that failed raised.
        """
        futures: list[Future[Tensor]] = [Future() for _ in tasks]
        self._waiting.extend(zip(tasks, futures, strict=True))
        return [future.result() for future in futures]

    def advance(self, seconds: float) -> None:
        """Work for about so long, at least one turn of a task; at once when there is none."""
        end = time.monotonic() + seconds
        while self._waiting:
            self._turn(*self._waiting[0])
            if time.monotonic() >= end:
                return

    def _turn(self, task: Task, future: Future[Tensor]) -> None:
        try:
            next(task)
            return
        except StopIteration as done:
            future.set_result(done.value)
        except Exception as error:
            future.set_exception(error)
        self._waiting.popleft()
