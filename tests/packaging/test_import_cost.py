"""vLLM imports the entry point in every process, wanted or not: then it costs its own three modules."""

from __future__ import annotations

import os
import subprocess
import sys

OWN = ["lora_plugin", "lora_plugin.plugin", "lora_plugin.switch"]


def test_the_entry_point_imports_nothing_but_itself_and_the_standard_library() -> None:
    script = (
        "import sys; before = set(sys.modules)\n"
        "import lora_plugin.plugin; lora_plugin.plugin.register()\n"
        "new = set(sys.modules) - before\n"
        "print(*sorted(name for name in new if name.partition('.')[0] not in sys.stdlib_module_names))\n"
    )
    unset = {name: value for name, value in os.environ.items() if not name.startswith("LORA_PLUGIN_")}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=unset)
    assert done.stdout.split() == OWN
