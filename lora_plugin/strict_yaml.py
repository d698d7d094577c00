"""A small YAML file read strictly: no references, no key twice, nothing but plain data."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

MAX_BYTES: Final = 1 << 20
_BOOL: Final = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Without `*references`, which grow a small file to any size, and keys that are given twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="references (*) are not accepted", problem_mark=self.get_mark()
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value[:100]!r} is given twice", problem_mark=key.start_mark
                )
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep=deep)


# Names such as `on`, `off`, `yes` and `no` are texts, as in YAML 1.2.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(?:true|false)$"), list("tf"))


def read_yaml(data: bytes) -> Any:
    """The document as dict, list, str, int, float, bool, date or None.

    Raises:
        ValueError: it is no such document; the message has one line and says where.
    """
    try:
        return yaml.load(data, _Loader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(f"{error.problem or 'not YAML'}{where}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())[:200] or "not YAML") from None
