"""Adapters from the Hugging Face Hub: by `name.hub.yaml` in the watched directory, or by a request."""
