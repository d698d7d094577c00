"""Grouped shrink and expand for GPUs: everything that changes per step is read from device memory.

`tiles` packs a step, `tables` holds the tile shapes per architecture, `shrink` and `expand` are the
kernels, `layer` launches them. Only the last three need Triton.
"""
