"""Adapters on disk: named, checked, identified by their content and packed for serving."""
