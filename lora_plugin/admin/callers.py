"""Who calls: tokens, and a limit for those who guess them."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_SCHEME = "bearer "
_GUESSES = 10
_SECONDS_PER_GUESS = 6.0
_MAX_PEERS = 1024


class Caller(StrEnum):
    """What a request's token makes its caller; the word in the audit log."""

    ADMIN = "admin token"
    READ = "read token"
    ANYONE = "no token"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that the endpoint knows.

    Attributes:
        admin: may do everything; None: nobody needs a token.
        read: may read only.
    """

    admin: str | None = None
    read: str | None = None

    def caller(self, authorization: str) -> Caller | None:
        """Whose an Authorization header is; None where it holds no token that is known."""
        if self.admin is None:
            return Caller.ANYONE
        scheme, given = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        # Both are compared always, each in a time that does not depend on where they differ.
        admin, read = _same(given, self.admin), _same(given, self.read)
        if scheme.lower() != _SCHEME or not (admin or read):
            return None
        return Caller.ADMIN if admin else Caller.READ


class GuessLimit:
    """Wrong tokens per peer: ten at once, then one every six seconds; until then nothing is let in.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def wait(self, peer: str) -> float:
        """Seconds until the peer may try again; 0 when it may now."""
        ahead = self._free_at.get(_network(peer), 0.0) - self._clock()
        return max(0.0, ahead - _SECONDS_PER_GUESS * (_GUESSES - 1))

    def wrong(self, peer: str) -> None:
        """The peer sent a token that is not known."""
        network = _network(peer)
        free_at = max(self._free_at.pop(network, 0.0), self._clock())
        self._free_at[network] = free_at + _SECONDS_PER_GUESS
        while len(self._free_at) > _MAX_PEERS:
            self._free_at.popitem(last=False)


def _same(given: str, token: str | None) -> bool:
    expected = "" if token is None else token
    equal = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
    return equal and bool(expected)


def _network(peer: str) -> str:
    """Addresses that one caller can choose from freely: an IPv6 network of 64 bits."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    return peer if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
