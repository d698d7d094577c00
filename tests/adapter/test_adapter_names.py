from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugin.adapter.digest import ContentDigest, adapter_id
from lora_plugin.adapter.names import RESERVED, check_name, is_adapter_name, is_temporary
from lora_plugin.errors import AdapterRejected, Code


@pytest.mark.parametrize("name", ["a", "Z9", "my-lora_v1.2", "0", "a" * 100, "checkpoint-100", "tmp", "text"])
def test_names(name: str) -> None:
    assert is_adapter_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "-a", "_a", "a/b", "a\\b", "a b", "a\n", "\na", "ä", "a\0", "a" * 101, "lost+found"],
)
def test_names_outside_the_grammar(name: str) -> None:
    assert not is_adapter_name(name)
    with pytest.raises(AdapterRejected) as caught:
        check_name(name, ())
    assert caught.value.code is Code.NAME_INVALID


@pytest.mark.parametrize(
    "name",
    [
        "..data",
        "..2026_01_01",
        ".git",
        ".a.X7fQ2z",
        ".#a",
        "#a#",
        "a~",
        "a.tmp",
        "a.TMP",
        "a.partial",
        "a.swp",
    ],
)
def test_temporary_names(name: str) -> None:
    assert is_temporary(name)
    assert not is_adapter_name(name)


@pytest.mark.parametrize("name", [*RESERVED, "base"])
def test_names_that_are_taken(name: str) -> None:
    with pytest.raises(AdapterRejected) as caught:
        check_name(name, {"base"})
    assert caught.value.code is Code.NAME_RESERVED
    check_name(f"{name}2", {"base"})


@given(st.text(alphabet=string.printable + "äß\0", max_size=12))
def test_a_name_is_one_harmless_path_component(name: str) -> None:
    if is_adapter_name(name):
        assert name.isascii()
        assert not set(name) & set("/\\\0\n ")
        assert not name.startswith(".")


@given(st.text(max_size=20), st.text(alphabet="0123456789abcdef", min_size=64, max_size=64))
def test_ids_are_those_of_the_version_and_leave_the_hosts_alone(name: str, digest: str) -> None:
    name = name.encode("utf-8", "ignore").decode()
    assert 2**20 <= adapter_id(name, digest) < 2**62
    assert adapter_id(name, digest) == adapter_id(name, digest)
    assert adapter_id(name, digest) != adapter_id(f"{name}x", digest)


def test_bytes_do_not_move_between_files() -> None:
    def digest(*files: bytes) -> str:
        found = ContentDigest(b"{}")
        for file in files:
            found.begin(len(file))
            found.update(file)
        return found.hexdigest()

    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc"), digest(b"abc", b"")}) == 4
