"""Torch models over a paged KV cache, its page allocator, and sampling.

Models, cache and sampling know nothing of networks; `worker*` joins them with a fabric and a node, which is what
prefiller and decoder are built on.
"""

import os

# Read once, when torch loads its thread library, hence here. Nodes share the cores of a machine: threads that spin
# while they wait for each other take them from those waited for, and a step takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
