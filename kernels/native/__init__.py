"""A small C++ kernel for the CPU, compiled on the machine it runs on, when that can be done.

`build` compiles it into the user's cache, `library` loads it or says why not, `step` packs a step, `layer`
calls it. Needs a C++ compiler at the first start on a machine; without one, torch computes.
"""
