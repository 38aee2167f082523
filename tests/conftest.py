"""Settings of all tests."""

import os

import torch

pytest_plugins = ["support.fixtures"]

# The models are tiny: threads that wait for each other cost more than they save, above all on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
