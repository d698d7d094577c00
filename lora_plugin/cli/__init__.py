"""The command `lora-plugin`."""

from lora_plugin.cli.commands import main

__all__ = ["main"]
