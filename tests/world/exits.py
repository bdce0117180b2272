"""Processes that end in the middle of things, over and over: each must end with status 0.

    python tests/world/exits.py [RUNS] [--at-once 2]

What they are in the middle of: kernels being compiled, threads that leave values pending, loader
workers that live on, collectives with another rank. Prints a line for each that fails, and the
count; exit status 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lazy_tensor
from lazy_tensor import lazy_mode
from lazy_tensor.sharding import fully_shard, init_device_mesh

TIMEOUT_S = 300


def trained(n: int, n_steps: int) -> Any:
    """Steps of a model whose size nobody else has, so that its kernels are compiled."""
    model = nn.Sequential(nn.Linear(8, n), nn.GELU(), nn.LayerNorm(n), nn.Linear(n, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(n_steps):
        with lazy_mode():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
    return loss


def compiling(number: int) -> None:
    lazy_tensor.configure(compile_threshold=1, record="always")
    trained(8 + number % 1000, 2 + number * 37 % 200)


def threads(number: int) -> None:
    lazy_tensor.configure(backend="aten", record="always")
    kept = []
    started = [threading.Thread(target=lambda: kept.append(trained(8, 3))) for _ in range(4)]
    for thread in started:
        thread.start()  # no daemons: torch ends the process where one is at an op, eagerly too
    if number % 2:
        for thread in started:
            thread.join()
    kept.append(lazy_tensor.wrap(torch.ones(3)) * 2)


def loaders(_: int) -> None:
    lazy_tensor.configure(backend="aten", record="always")
    data = TensorDataset(torch.ones(64, 8))
    with lazy_mode():
        batches = iter(DataLoader(data, 4, num_workers=2, persistent_workers=True))
        (x,) = next(batches)
        x.sum()


def ranks(number: int) -> None:
    lazy_tensor.configure(backend="aten", record="always")
    dist.init_process_group("gloo", f"file://{os.environ['EXITS_STORE']}", rank=number % 2,
                            world_size=2)  # fmt: skip
    model = fully_shard(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()), mesh=init_device_mesh("cpu", (2,))
    )
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    lazy_tensor.flush()
    if number % 4 < 2:
        dist.destroy_process_group()


PROGRAMS = {f.__name__: f for f in (compiling, threads, loaders, ranks)}


def ends(name: str, number: int, **environment: str) -> list[str]:
    """A line that says how one process ended, unless it did so with status 0."""
    command = [sys.executable, __file__, "--be", name, str(number)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, check=False,
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode == 0:
        return []
    return [f"{name} {number}: {done.returncode} {done.stderr[-1000:]}"]


def pair_ends(number: int) -> list[str]:
    """The same for each of two ranks."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        store = os.path.join(folder, "store")
        both = pool.map(lambda i: ends("ranks", 2 * number + i, EXITS_STORE=store), range(2))
        return [line for lines in both for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--be", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        PROGRAMS[options.be](options.runs)
        return 0
    names = [name for name in PROGRAMS if name != "ranks"]
    n_pairs = options.runs // 5
    jobs = [lambda i=i: pair_ends(i) for i in range(n_pairs)]
    jobs += [lambda i=i: ends(names[i % len(names)], i) for i in range(options.runs - 2 * n_pairs)]
    n_failed = 0
    with ThreadPoolExecutor(options.at_once) as pool:
        for lines in pool.map(lambda job: job(), jobs):
            n_failed += len(lines)
            for line in lines:
                print(line, flush=True)
    print(f"{options.runs} processes, {n_failed} did not end with status 0")
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
