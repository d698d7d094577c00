"""The base model as its folder describes it, for checks without a server, torch or the host."""
