"""The rows of a step as plugins see them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lora_plugin.hooks import Batch
from lora_plugin.hooks.manager import HookManager


class StepListeners:
    """Tells the plugins of every batch.

    Args:
        hooks: whom to tell.
        name_of: an adapter's name by its id.
    """

    def __init__(self, hooks: HookManager, name_of: Callable[[int], str]) -> None:
        self._hooks = hooks
        self._name_of = name_of

    def tell(self, ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """The next step's rows.

        Args:
            ids: [requests] adapter ids in row order, 0 for the base model.
            tokens: [requests] rows of each request.
        """
        places: dict[int, int] = {}
        index = tuple(places.setdefault(i, len(places)) if i else -1 for i in ids.tolist())
        names = tuple(map(self._name_of, places))
        self._hooks.batch_built(Batch(names, index, tuple(tokens.tolist())))
