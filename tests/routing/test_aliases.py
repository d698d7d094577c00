"""`aliases.yaml` and `compositions.yaml`: what is accepted, what is drawn, and what sticks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugin.hooks import Part, Request, Selection
from lora_plugin.routing.aliases import parse_aliases
from lora_plugin.routing.compositions import parse_compositions
from lora_plugin.strict_yaml import read_yaml

BASES = ("smollm2",)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a", "a@1234567"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def aliases(text: str) -> Any:
    return parse_aliases(read_yaml(text.encode()), BASES)


def test_every_form_of_an_entry() -> None:
    found = aliases("""
        prod: sql
        old: sql@4F2A91C
        off: base
        law: {law: 90, law-next: 10}
        chat: {to: {a: 1, base: 0.5}, sticky: X-Tenant, fallback: base}
    """)
    assert found["prod"].targets == ((Selection("sql"), 1.0),)
    assert found["old"].targets == ((Selection("sql", "4f2a91c"), 1.0),)
    assert found["off"].targets == ((Selection(None), 1.0),)
    # Its own name is the folder's.
    assert found["law"].targets == ((Selection("law"), 90.0), (Selection("law-next"), 10.0))
    chat = found["chat"]
    assert (chat.targets[1], chat.sticky, chat.fallback) == ((Selection(None), 0.5), "x-tenant", True)


def test_a_file_of_many_aliases_is_read_in_time_that_grows_with_it() -> None:
    """The largest file that is accepted has about so many: no minutes on the thread that watches."""
    many = {f"a{number}": {"sql": 1, f"a{number}": 1} for number in range(60_000)}
    assert len(parse_aliases(many, BASES)) == 60_000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a, b]", "expected a mapping"),
        ("true: sql", "not a text"),
        ("12: sql", "not a text"),
        ("a/b: sql", "not a name"),
        ("base: sql", "taken"),
        ("smollm2: sql", "taken"),
        ("text: sql", "taken"),
        ("a: ../sql", "neither"),
        ("a: 12", "a:"),
        ("a: [b, c]", "a:"),
        ("a: {}", "more than 0"),
        ("a: {b: 0}", "more than 0"),
        ("a: {b: -1, c: 2}", "greater than or equal to 0"),
        ("a: {b: .nan, c: 1}", "a: to"),
        ("a: {b: .inf}", "a: to"),
        ("a: {b: true}", "a: to"),
        ("a: {to: b, fallback: none}", "fallback"),
        ("a: {to: b, weight: 3}", "weight"),
        ("a: {sticky: X}", "to"),
        ("a: {to: b, sticky: 'X Y'}", "sticky"),
        ("a: b\nb: c", "an alias itself"),
        ("a: b\nb: a", "an alias itself"),
        ("a: {a: 1, b: 1}\nb: b", "an alias itself"),
        ("a: b\na: c", "twice"),
        ("a: &x b\nc: *x", "references"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: {", "line"),
        ("a: \x00", "special characters"),
        ("[" * 5000, "nested"),
    ],
)
def test_bad_files_say_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        aliases(text)
    assert "\n" not in str(error.value)


def complaint(read: Callable[[], object]) -> str:
    """The words of a refusal; any other exception fails the test."""
    try:
        read()
    except ValueError as error:
        return str(error)
    return "none"


@given(JSON)
def test_any_document_is_taken_or_refused_in_one_line(document: Any) -> None:
    for parse in (parse_aliases, parse_compositions):
        words = complaint(lambda parse=parse: parse(document, BASES))
        assert words
        assert "\n" not in words


@given(st.binary(max_size=200))
def test_any_bytes_are_yaml_or_not(data: bytes) -> None:
    assert "\n" not in complaint(lambda: read_yaml(data))


def draws(alias: Any, count: int, **request: Any) -> Counter[str | None]:
    return Counter(alias.choose(Request("canary", **request)).adapter for _ in range(count))


def within(found: int, count: int, share: float) -> bool:
    """Five standard deviations: one false alarm in two million."""
    return abs(found - count * share) < 5 * math.sqrt(count * share * (1 - share))


@pytest.mark.parametrize("how", ["at random", "by user", "by header"])
def test_a_split_is_as_its_weights_say(how: str) -> None:
    canary = aliases("canary: {to: {a: 70, b: 25, off: 0, base: 5}, sticky: X-Tenant}")["canary"]
    count = 20_000
    found: Counter[str | None] = Counter()
    for i in range(count):
        fields = {"user": f"user {i}"} if how == "by user" else {}
        headers = {"x-tenant": f"tenant {i}"} if how == "by header" else {}
        found[canary.choose(Request("canary", fields, headers)).adapter] += 1
    assert set(found) == {"a", "b", None}
    for target, share in (("a", 0.7), ("b", 0.25), (None, 0.05)):
        assert within(found[target], count, share), found


def test_a_key_sticks_and_the_header_comes_first() -> None:
    canary = aliases("canary: {to: {a: 1, b: 1}, sticky: X-Tenant}")["canary"]
    for key in map(str, range(50)):
        by_user = draws(canary, 5, fields={"user": key})
        by_header = draws(canary, 5, fields={"user": "someone"}, headers={"x-tenant": key})
        assert len(by_user) == 1
        assert by_user == by_header
    assert len(draws(canary, 200, fields={"user": 7})) == 2


def test_another_split_moves_only_as_many_as_it_must() -> None:
    before = aliases("canary: {a: 90, b: 10}")["canary"]
    after = aliases("canary: {a: 80, b: 20}")["canary"]
    moved = Counter(
        (before.choose(said).adapter, after.choose(said).adapter)
        for said in (Request("canary", {"user": str(i)}) for i in range(5000))
    )
    assert moved[("b", "a")] == 0
    assert within(moved[("a", "b")], 5000, 0.1)


def test_two_aliases_are_drawn_apart() -> None:
    both = aliases("one: {a: 1, b: 1}\ntwo: {a: 1, b: 1}")
    pairs = Counter(
        tuple(both[name].choose(Request(name, {"user": str(i)})).adapter for name in ("one", "two"))
        for i in range(4000)
    )
    assert all(within(count, 4000, 0.25) for count in pairs.values())


def test_compositions() -> None:
    found = parse_compositions(read_yaml(b"mix: a*0.7+b\npolite: {sql: 1, tone@4f2a91c: -0.4}\n"), BASES)
    assert found == {
        "mix": (Part("a", None, 0.7), Part("b")),
        "polite": (Part("sql"), Part("tone", "4f2a91c", -0.4)),
    }


@pytest.mark.parametrize(
    "text", ["m: a", "m: {a: 0}", "m: {base: 1}", "m: {}", "m: a+base/", "m: 3", "base: a+b"]
)
def test_bad_compositions(text: str) -> None:
    with pytest.raises(ValueError):
        parse_compositions(read_yaml(text.encode()), BASES)
