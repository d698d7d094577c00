"""The hook set: pluggy specs, the manager, the built-in hooks."""
