"""The command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

Result = subprocess.CompletedProcess[str]
PROGRAM = (sys.executable, "-c", "import sys; from lora_plugin.cli import main; sys.exit(main())")


def run(*arguments: str, **variables: str) -> Result:
    """One run, with only `variables` of the plugin's settings."""
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, env=environment(**variables), timeout=60
    )


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with only `variables` of the plugin's settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LORA_PLUGIN_", "NIM_PEFT_"))
    }
    return {**inherited, **variables}
