"""`python -m lazy_tensor doctor`: shows what is installed, built, available and set.

Each part is a function that yields `(name, text)`. Where something is missing, the text says why
and what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch._inductor import config as inductor_config

import lazy_tensor
from lazy_tensor.cli.checks import checks
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.options import NAMES
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.kernels import available_backends
from lazy_tensor.kernels.extension import cpp
from lazy_tensor.kernels.nvfuser import library as nvfuser

Line = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`doctor` has no arguments."""


def run(args: argparse.Namespace) -> int:
    for title, lines in (
        ("versions", versions()),
        ("devices", devices()),
        ("backends", backends()),
        ("C++ of the package", parts_in_cpp()),
        ("settings", settings_in_force()),
        ("caches", caches()),
        ("checks", checks()),
    ):
        print(title)
        for name, text in lines:
            print(f"  {name:<22}{text}")
    return 0


def versions() -> Iterator[Line]:
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "lazy-tensor", installed_version("lazy-tensor")
    yield "torch", torch.__version__
    yield "cachetools", installed_version("cachetools")
    yield "nvfuser", nvfuser.problem() or nvfuser.installed()
    yield "C++ compiler", compiler_version(inductor_config.cpp.cxx[1])


def installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def compiler_version(compiler: str) -> str:
    """The first line of what the compiler says of itself, or what is missing without it."""
    path = shutil.which(compiler)
    if path is None:
        return f"{compiler} not found: no kernels for the CPU"
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return next(iter(answer.stdout.splitlines()), f"{path} doesn't say its version")


def devices() -> Iterator[Line]:
    yield "cpu", f"{torch.get_num_threads()} threads of {os.cpu_count()} processors"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory_gib = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        yield f"cuda:{index}", f"{properties.name}, {memory_gib:.0f} GiB, capability {capability}"


def backends() -> Iterator[Line]:
    """Each backend on each kind of device of this machine: available, or why not."""
    for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name, reason in available_backends(device_type).items():
            yield f"{name} on {device_type}", "available" if reason is None else reason


def parts_in_cpp() -> Iterator[Line]:
    """Whether each C++ part is built (recorder, plans); if not, why."""
    if settings.records_in_python():
        yield "recorder", "off, as LAZY_TENSOR_HITS=python says: ops are recorded in Python"
    else:
        missing = "until then ops on wrapped tensors go through Python, at three times the cost"
        yield "recorder", built(cpp.HITS, missing)
    yield "plans", built(cpp.PROGRAM, "until then ops run one by one, without kernels")


def built(source: cpp.Source, without: str) -> str:
    """Where the compiled file is, or why there is none and what to do. `without` says how programs
    run until then."""
    # `setup.py` builds it into the package; else it is in `cache_dir`, beside the kernels
    if source.built() is not None:
        return "built, with the package"
    disk = compiler().disk
    if disk is not None and disk.get(source.key()) is not None:
        return f"built, in {disk.directory}"
    if problem := source.problem():
        return f"not built: {problem}; {without}"
    if settings.current().compile == "off":
        return f'not built, and compile="off" builds none; {without}'
    return (
        "not built yet: a program that works for a second builds it in the background, "
        f"`python -m lazy_tensor cache warm SCRIPT` at once; {without}"
    )


def settings_in_force() -> Iterator[Line]:
    """Each option with its value and its source. In this process nobody has called `configure`, so
    a value that isn't the default comes from the environment."""
    current, defaults = settings.current(), settings.Settings()
    for name in NAMES:
        value = getattr(current, name)
        is_default = value == getattr(defaults, name)
        source = "default" if is_default else f"LAZY_TENSOR_{name.upper()}"
        shown = ", ".join(sorted(value)) or "nothing" if isinstance(value, frozenset) else value
        yield name, f"{shown}  ({source})"


def caches() -> Iterator[Line]:
    folder = Path(settings.current().cache_dir)
    sizes = list(file_sizes(folder))
    on_disk = f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB" if sizes else "empty"
    yield "on disk", f"{folder}: {on_disk}"
    for name, info in lazy_tensor.cache_info().items():
        bound = (
            f"{(info.maxsize or 0) / 2**20:.0f} MiB"
            if name == "memory"
            else f"{info.maxsize} entries"
        )
        yield name, f"in memory, at most {bound}"


def file_sizes(folder: Path) -> Iterator[int]:
    """Bytes of each file below `folder`, without files that other processes remove meanwhile."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path.stat().st_size
