"""Which adapters the rows of the last steps belonged to: kept as they are, counted when somebody asks."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_STEPS: Final = 32


class RecentBatches:
    """The last steps of one worker."""

    def __init__(self) -> None:
        self._steps: deque[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = deque(maxlen=_STEPS)

    def note(self, ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """One step.

        Args:
            ids: [requests] adapter ids, 0 for the base model; not to be written again.
            tokens: [requests] rows of each request; not to be written again.
        """
        self._steps.append((ids, tokens))

    def to_list(self) -> list[list[dict[str, Any]]]:
        """For each step, oldest first, its adapters with their requests and rows; ids as strings."""
        return [
            [
                {
                    "id": str(adapter_id),
                    "requests": int((ids == adapter_id).sum()),
                    "rows": int(tokens[ids == adapter_id].sum()),
                }
                for adapter_id in np.unique(ids).tolist()
            ]
            for ids, tokens in self._steps
        ]
