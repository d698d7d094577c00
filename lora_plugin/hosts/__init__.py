"""Serving engines that the plugin can be loaded into; the only code that imports them."""
