"""Versions made ready in the engines, and kept while responses use them: the API server's side."""
