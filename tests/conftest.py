"""What several areas of tests share."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

# For the servers and scripts that tests start; see the file there.
os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent / "tools" / "steady")


@pytest.fixture(autouse=True)
def log_propagates(monkeypatch: pytest.MonkeyPatch) -> None:
    """To caplog, and once, whether or not the host's logging was set up in this process before."""
    logger = logging.getLogger("lora_plugin")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "handlers", [])


@pytest.fixture(scope="session")
def chromium() -> dict[str, Any]:
    """How Playwright launches the machine's Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine (Debian's package: chromium)")
    # Without a sandbox it also runs as root in a container; it only sees this test's own page.
    switches = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    return {"executable_path": path, "args": switches}
