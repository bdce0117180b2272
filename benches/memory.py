"""The peak of this process's memory, in bytes.

In: a device. Out: resident memory for the CPU, allocated memory for CUDA. Call `start_peak` before
what is measured, and `peak_bytes` after it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def start_peak(device: torch.device) -> int:
    """Forget the peak so far, where the system can do that. Returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if Path("/proc/self/clear_refs").exists():
        # resets VmHWM to the present size (proc_pid_clear_refs(5))
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # not ru_maxrss: it survives exec, so it has the peak of the parent, which ran both sides
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
