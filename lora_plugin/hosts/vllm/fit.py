"""Whether the plugin fits the vLLM that is installed: `python -m lora_plugin.hosts.vllm.fit`.

Exits with 0 if it does, else with 1 and the reason as the last line of stderr: on stdout vLLM may log.
Nothing is changed.
"""

from __future__ import annotations

import sys

from lora_plugin.errors import HostIncompatible
from lora_plugin.hosts.vllm.install import seams
from lora_plugin.hosts.vllm.seams import check_all


def main() -> int:
    try:
        check_all(seams())
    except HostIncompatible as error:
        print(error.reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
