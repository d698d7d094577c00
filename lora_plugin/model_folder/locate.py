"""Where a base model's folder is: a path, or what the local Hugging Face cache holds of a repository."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


class ModelUnreadable(ValueError):
    """There is no such model here, or its files do not say what it looks like."""


def locate(model: str) -> Path:
    """The folder of `model`, a path or a repository's id. Nothing is fetched.

    Raises:
        ModelUnreadable: there is no such folder, and no such repository in the local cache.
    """
    # Raised for a name that is too long, a parent that is closed, another's home that is not there.
    with suppress(OSError, RuntimeError):
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise ModelUnreadable(f"{model!r} is neither a folder nor in the local Hugging Face cache") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        ModelUnreadable: it is missing, or no JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        raise ModelUnreadable(f"the model's config.json cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelUnreadable("the model's config.json is not valid JSON") from None
    if not isinstance(config, dict):
        raise ModelUnreadable("the model's config.json is not a JSON object")
    return config
