"""Multi-LoRA serving for vLLM: adapter folders in a watched directory, served by name."""


def __getattr__(name: str) -> str:
    # The version is looked up on demand: importing the entry point must cost next to nothing.
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("vllm-lora-plugin")
        except PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(name)
