"""Where a fetched folder came from, kept in the folder: what tells it from one that a person copied."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_plugin.adapter.files import open_plain
from lora_plugin.hub.reference import HubReference

FILE: Final = ".lora_plugin_origin.json"
_MAX_BYTES: Final = 64 << 10


class Origin(BaseModel):
    """What was fetched.

    Attributes:
        reference: what was asked for.
        commit: what its revision was at that time.
        owner: the adapter whose `.hub.yaml` asked for it, with which it goes; empty: a request did, or a
            person copied or renamed the folder, and it stays.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    reference: HubReference
    commit: Annotated[str, Field(pattern=r"^[0-9A-Za-z._-]{1,100}$")]
    owner: str = ""

    def __str__(self) -> str:
        folder = f"/{self.reference.subfolder}" if self.reference.subfolder else ""
        return f"hub:{self.reference.repo}{folder}@{self.commit}"

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """The origin of a folder; None where it was not fetched, or the record cannot be read."""
        if folder.is_symlink():
            return None
        try:
            # Nothing outside the directory is opened, nor waited for.
            with open_plain(folder / FILE) as file:
                origin = cls.model_validate_json(file.read(_MAX_BYTES))
        except (OSError, ValidationError):
            return None
        return origin if origin.owner == folder.name else origin.model_copy(update={"owner": ""})

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(self.model_dump_json())
