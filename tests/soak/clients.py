"""Sixteen clients that ask all the time; every answer is compared with the solo one of its version."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from server import BASE, Server
from stock import Stock

TOKENS = 10
_REFUSALS = {400, 404, 503}


@dataclass(frozen=True)
class Answer:
    """A response: status, what it says it was answered by, tokens with their log-probabilities, the error.

    `ended` says that it was ended before its time: its adapter was unloaded.
    """

    status: int
    label: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    error: str = ""
    ended: bool = False

    def equals(self, other: Answer) -> bool:
        """The same tokens; a different one only where the two were as good as equally likely."""
        if len(self.tokens) != len(other.tokens) and not self.ended:
            return False
        for mine, theirs, a, b in zip(self.tokens, other.tokens, self.logprobs, other.logprobs, strict=False):
            if abs(a - b) > 1e-3:
                return False
            if mine != theirs:
                return True
        return True


def ask(server: Server, name: str, prompt: list[int], *, hang_up: bool = False) -> Answer | None:
    """One greedy completion; None after hanging up in the middle of a stream."""
    body: dict[str, Any] = {
        "model": name,
        "prompt": prompt,
        "max_tokens": 200 if hang_up else TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": hang_up,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        label = response.getheader("X-LoRA-Adapter", "")
        if hang_up and response.status == 200:
            response.read(100)
            return None
        payload = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        return Answer(response.status, label, error=json.dumps(payload)[:500])
    choice = payload["choices"][0]
    return Answer(
        200,
        label,
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        ended=choice["finish_reason"] == "abort",
    )


class Clients:
    """Threads that ask until they are stopped; `wrong` holds what must not have happened.

    Args:
        server: whom they ask.
        stock: says whether a refusal is in order.
        expected: (name or base, version, prompt) -> solo answer.
        prompts: what they ask.
        count: how many there are.
        seed: decides who asks what.
    """

    def __init__(
        self,
        server: Server,
        stock: Stock,
        expected: dict[tuple[str, int], Answer],
        prompts: list[list[int]],
        *,
        count: int,
        seed: int,
    ) -> None:
        self._server = server
        self._stock = stock
        self._expected = expected
        self._prompts = prompts
        self._stop = threading.Event()
        self.up = threading.Event()
        self.up.set()
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),))
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.up.set()
        for thread in self._threads:
            thread.join(180)
            if thread.is_alive():
                self.wrong.append("a request hangs")

    def _run(self, chance: random.Random) -> None:
        names = [*self._stock.contents, BASE]
        # A few names get most of the requests, as in life.
        weights = [1 / (1 + number) ** 0.7 for number in range(len(names))]
        while not self._stop.is_set() and len(self.wrong) < 20:
            self.up.wait()
            name = chance.choices(names, weights)[0]
            self._one(name, chance.randrange(len(self._prompts)), hang_up=chance.random() < 0.05)

    def _one(self, name: str, prompt: int, *, hang_up: bool) -> None:
        began = time.monotonic()
        try:
            answer = ask(self._server, name, self._prompts[prompt], hang_up=hang_up)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self.up.is_set() and not self._stop.is_set():
                # The kill comes between the question and the answer.
                time.sleep(0.5)
                if self.up.is_set():
                    self.wrong.append(f"{name}: {error!r}")
            return
        if answer is None:
            self.seen["hung up"] += 1
        elif answer.status == 200:
            self.seen["ended" if answer.ended else "answered"] += 1
            if answer.ended and not self._stock.may_be_refused(name, began):
                self.wrong.append(f"{name}: {answer}")
            self._compare(name, prompt, answer)
        else:
            self.seen[str(answer.status)] += 1
            refusable = name != BASE and self._stock.may_be_refused(name, began)
            if answer.status not in _REFUSALS or not refusable:
                self.wrong.append(f"{name}: {answer}")

    def _compare(self, name: str, prompt: int, answer: Answer) -> None:
        named, _, version = answer.label.partition("@")
        expected = self._expected.get((version, prompt))
        if named != name:
            self.wrong.append(f"{name} was answered by {answer.label}")
        elif expected is None:
            self.wrong.append(f"nobody put version {version} under {name}")
        elif not answer.equals(expected):
            self.wrong.append(f"{answer.label} answered {answer}, alone {expected}")
