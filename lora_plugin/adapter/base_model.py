"""The base model's weights as staging may see them: never the weights, which a host packs or quantises.

Staging runs on a thread of its own, but a base layer may only be used by the thread that computes steps. So
what staging needs of it is written as a `Task`, which does a little at each turn and is run by the host.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

Task = Generator[None, None, Tensor]
"""Work on base layers: yields after every few milliseconds' worth, and returns its result."""


class BaseLayer(Protocol):
    """One wrapped layer of the base model; W is this rank's [outputs, in], of all slices."""

    @property
    def bias(self) -> Tensor | None:
        """What the layer adds to x W^T, float32 [outputs] on the host; None for nothing."""
        ...

    @property
    def adds_bias(self) -> bool:
        """Whether the output that an adapter changes holds the bias already."""
        ...

    def products(self, x: Tensor) -> Task:
        """x W^T, float32 [n, outputs], of x [n, in] and without the bias."""
        ...

    def rows(self, tokens: Tensor) -> Task:
        """float32 [tokens, width]: the weights of tokens, of an embedding or an lm_head.

        Raises:
            AdapterRejected: FEATURE_UNSUPPORTED, when turned, where they cannot be read.
        """
        ...

    def squared_norms(self) -> Task:
        """float32 [outputs]: the sum of squares of the weights of each output."""
        ...


class BaseModel(Protocol):
    """The base model as the host has it."""

    @property
    def layers(self) -> Sequence[BaseLayer]:
        """In the order of `ModelLayout.layers`; others once the weights are replaced."""
        ...

    @property
    def parameters(self) -> Sequence[str]:
        """The names of all parameters that the host has, of wrapped layers in its own way."""
        ...

    def parameter(self, name: str) -> Task:
        """float32: a parameter by its name in the trained model, "model.norm.weight".

        Raises:
            AdapterRejected: FEATURE_UNSUPPORTED, when turned, where the host has no such one.
        """
        ...

    def run(self, tasks: Sequence[Task]) -> list[Tensor]:
        """The results, on the host; waits while the host runs the tasks on the thread of its steps.

        Raises:
            Exception: what a task raised.
        """
        ...
