"""Adapters that come from elsewhere: fetched beside the watched directory, then moved into it as a whole."""
