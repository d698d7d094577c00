"""Which repository of the Hub an adapter comes from: what `name.hub.yaml` says."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from lora_plugin.adapter.files import FileStamp, read_small, reasons
from lora_plugin.directory.own_folder import replace_file
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.strict_yaml import read_yaml

SUFFIX: Final = ".hub.yaml"
_SLASH: Final = "--"
"""Stands for the slash in an adapter's name: the Hub has no names with it."""
_MAX_BYTES: Final = 64 << 10
_REPO: Final = re.compile(
    r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}(?<![.-])", re.ASCII
)
_REVISION: Final = re.compile(r"[\w][\w./-]{0,254}", re.ASCII)
_PLACE: Final = "a repository as organisation/name"
_FIELDS: Final = "the fields repo, revision, subfolder"
_EXPECTED: Final = {
    "missing": _PLACE,
    "string_type": "a text, in quotes where YAML takes it for something else",
    "model_type": _FIELDS,
    "extra_forbidden": _FIELDS,
}
"""In the place of pydantic's words, by its kinds of errors; only `repo` can be missing."""


def _repo(text: str) -> str:
    if not is_repo(text):
        raise ValueError(_PLACE)
    return text


def _revision(text: str) -> str:
    if not _REVISION.fullmatch(text) or ".." in text:
        raise ValueError("a branch, a tag or a commit")
    return text


def _subfolder(text: str) -> str:
    parts = text.strip("/").split("/")
    if not all(part and part.isprintable() and part not in (".", "..") for part in parts):
        raise ValueError("a folder in the repository, without '..'")
    return "/".join(parts)


class HubReference(BaseModel):
    """A place on the Hub.

    Attributes:
        repo: organisation/name.
        revision: a branch, a tag or a commit.
        subfolder: where the adapter is in the repository; None: at its top.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    repo: Annotated[str, AfterValidator(_repo)]
    revision: Annotated[str, AfterValidator(_revision)] = "main"
    subfolder: Annotated[str, AfterValidator(_subfolder)] | None = None

    def __str__(self) -> str:
        folder = f"/{self.subfolder}" if self.subfolder else ""
        return f"{self.repo}{folder}@{self.revision}"

    def check_allowed(self, patterns: Collection[str]) -> None:
        """Raises AdapterRejected (HUB_NOT_ALLOWED) for a repository that no pattern names."""
        if not is_allowed(self.repo, patterns):
            raise AdapterRejected(
                Code.HUB_NOT_ALLOWED,
                f"{self.repo} may not be fetched",
                expected="a repository that LORA_PLUGIN_HUB_ALLOW names",
                hint=f"add {self.repo} to LORA_PLUGIN_HUB_ALLOW, if it is to be served",
            )

    def dump(self) -> bytes:
        """The content of a `.hub.yaml`."""
        text: str = yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)
        return text.encode()


def is_repo(text: str) -> bool:
    """Whether it can be the name of a repository: one slash, no path."""
    return _REPO.fullmatch(text) is not None


def name_of(text: str) -> str:
    """The adapter's name for a repository's, `org--name` for `org/name`; any other text as it is."""
    return text.replace("/", _SLASH) if is_repo(text) else text


def repo_of(name: str) -> str | None:
    """The inverse of `name_of`; None for a name that it does not make."""
    repo = name.replace(_SLASH, "/")
    return repo if is_repo(repo) and name_of(repo) == name else None


def is_allowed(repo: str, patterns: Collection[str]) -> bool:
    """Whether a pattern (`org/*`; case matters) names the repository."""
    return any(fnmatchcase(repo, pattern) for pattern in patterns)


def parse_reference(data: bytes) -> HubReference:
    """The reference that a `.hub.yaml` holds.

    Raises:
        AdapterRejected: HUB_REFERENCE_INVALID, naming the field.
    """
    try:
        content = read_yaml(data)
    except ValueError as error:
        raise _invalid(f"it is not YAML: {error}", _FIELDS) from None
    try:
        return HubReference.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        wrong = "is missing" if first["type"] == "missing" else "is not right"
        expected = first.get("ctx", {}).get("error") or _EXPECTED.get(first["type"], first["msg"])
        raise _invalid(f"{field} {wrong}", str(expected)) from None


def read_reference(root: Path, name: str) -> HubReference | None:
    """The reference of an adapter; None without a file. It must lie in `root`, links followed.

    Raises:
        AdapterRejected: HUB_REFERENCE_INVALID, PATH_ESCAPE, TOO_LARGE or UNREADABLE.
        AdapterIncomplete: it changed while it was read.
    """
    file = f"{name}{SUFFIX}"
    with reasons(file, root / file):
        try:
            real = Path(os.path.realpath(root / file, strict=True))
        except FileNotFoundError:
            return None
        if not real.is_relative_to(os.path.realpath(root)):
            raise AdapterRejected(
                Code.PATH_ESCAPE, f"{file} is a link that leads out of the adapter directory"
            )
        stamp = FileStamp.of(file, real, real.stat())
    return parse_reference(read_small(stamp, _MAX_BYTES))


def write_reference(root: Path, name: str, reference: HubReference) -> None:
    """Puts an adapter's `.hub.yaml` into the directory, or replaces it. Raises OSError."""
    replace_file(root, root / f"{name}{SUFFIX}", reference.dump())


def _invalid(message: str, expected: str) -> AdapterRejected:
    return AdapterRejected(
        Code.HUB_REFERENCE_INVALID,
        f"the reference to the Hub cannot be read: {message}",
        expected=expected,
        hint="for example: repo: organisation/name",
    )
