"""Refusals of the settings, in the operator's terms: the variable, its value, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from pydantic import ValidationError

from lora_plugin.errors import Code, SettingsError
from lora_plugin.switch import PREFIX

MASK = "****"
SIZE = "a size such as 512MiB or 4GiB"
_EXPECTED = {
    "bool_parsing": "1 or 0",
    "byte_size": SIZE,
    "byte_size_unit": SIZE,
    "float_parsing": "a number",
    "int_parsing": "a whole number",
    "finite_number": "a finite number",
}


def is_secret(variable: str) -> bool:
    """Whether a variable's value is never shown."""
    return variable.endswith("_TOKEN")


def refuse_unknown(given: Mapping[str, str], known: Collection[str]) -> None:
    """Raises SettingsError for a `LORA_PLUGIN_*` variable that no setting has."""
    for name in sorted(given):
        if name.upper().startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.6)
            raise SettingsError(
                Code.SETTINGS_INVALID,
                f"{name} is not a setting",
                expected=near[0] if near else f"one of {', '.join(sorted(known))}",
                found=name,
                hint=f"did you mean {near[0]}?" if near else "unset it, or correct its name",
            )


def refuse_invalid(
    error: ValidationError, variables: Mapping[str, tuple[str, ...]], given: Mapping[str, str]
) -> SettingsError:
    """The SettingsError for the first value that does not validate."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SettingsError):
        return cause
    known = {name: name for names in variables.values() for name in names}
    place = str(first["loc"][0])
    names = variables.get(place, (known.get(place, place),))
    name = next((name for name in names if name in given), names[0])
    if name not in given:
        return SettingsError(
            Code.SETTINGS_INVALID, f"{name} is not set", expected="a value", hint=f"set {name}"
        )
    return SettingsError(
        Code.SETTINGS_INVALID,
        f"{name} has a value that does not fit",
        expected=_expected(first["type"], first["msg"], first.get("ctx", {})),
        found=MASK if is_secret(name) else repr(given[name]),
        hint=f"correct {name}, or unset it for its default",
    )


def refuse_contradiction(
    message: str, *, expected: str | None = None, found: str | None = None, hint: str
) -> SettingsError:
    """The SettingsError for values that do not go together."""
    return SettingsError(Code.SETTINGS_INVALID, message, expected=expected, found=found, hint=hint)


def _expected(kind: str, message: str, context: Mapping[str, object]) -> str:
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return str(context["expected"])
    return _EXPECTED.get(kind, message.removeprefix("Input should be "))
