"""The watched directory: what lies in it, what of that is served, and what changes."""
