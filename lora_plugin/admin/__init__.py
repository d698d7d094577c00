"""The admin endpoint: list, inspect, pin, evict and unload adapters over HTTP."""
