"""On the PYTHONPATH of `make`'s targets and of the tests: busy waits without `sched_yield`.

vLLM's processes wait for each other in a loop of `os.sched_yield`. On a Linux of 2025 (seen on 6.18) with two
cores, such a loop keeps unrelated processes from running for seconds, with and without this plugin.
"""

import os
import time

# A sleep of nothing ends after 0.1 ms, and takes a third of the core that steps run on where it shares that.
_SECONDS = 0.0003

os.sched_yield = lambda: time.sleep(_SECONDS)
