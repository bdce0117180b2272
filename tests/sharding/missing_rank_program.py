"""Run on each of two processes by `test_processes.py`: rank 1 dies, or goes another way.

Rank 0 must be told which op, which line and which rank, within the group's timeout.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lazy_tensor.sharding import Replicate, Shard, distribute_tensor, init_device_mesh

how = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
mesh = init_device_mesh("cpu", (2,))
tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
if dist.get_rank() == 1:
    if how == "dies":
        os._exit(0)
    time.sleep(15)
    os._exit(0)
start = time.monotonic()
gathered = [(tensor * i).redistribute(placements=[Replicate()]) for i in range(4)]
try:
    print(gathered[0].to_local().tolist())
except RuntimeError as error:
    print("\n".join([str(error), *error.__notes__]))
print(f"after {time.monotonic() - start:.0f} s")
sys.stdout.flush()
os._exit(0)
