"""How adapters are spelled in requests: any text is read without an error, and only as what it says."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugin.hooks import Part, Selection
from lora_plugin.hooks.builtin.spelling import MAX_PARTS, read_name, read_parts

NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
VERSION = st.text("0123456789abcdef", min_size=7, max_size=64)
WEIGHT = st.decimals(-999999, 999999, places=9).map(float).filter(bool)
PARTS = st.lists(st.builds(Part, NAME, st.none() | VERSION, WEIGHT), min_size=1, max_size=MAX_PARTS)


@given(NAME, VERSION)
def test_a_name_with_a_version(name: str, version: str) -> None:
    assert read_name(f"{name}@{version.upper()}") == Selection(name, version)
    assert read_name(name) == Selection(name)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "a+", "+a", "a++b", "a*", "a*0", "a*0.0+b", "a*nan", "a*1e9", "a*-", "a**2", "a b"),
        *("a*0.5 +b", "a+b\n", "/etc/passwd+a", "a+../b", "a*1234567", "a*0.1234567891"),
        "+".join("a" * (MAX_PARTS + 1)),
    ],
)
def test_what_is_no_composition(text: str) -> None:
    assert read_parts(text) == ()


def test_weights_may_be_negative_and_versions_fixed() -> None:
    assert read_parts("a@4F2A91C*-0.3+b-c") == (Part("a", "4f2a91c", -0.3), Part("b-c"))


@given(st.text(string.printable + "é\0", max_size=60))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert read_name(text).adapter is not None
    for part in read_parts(text):
        assert "/" not in part.adapter
        assert part.weight
