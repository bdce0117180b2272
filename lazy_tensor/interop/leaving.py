"""The end of a process: threads of torch's get time to let go of what they hold.

A worker of gloo tells that a collective is done and then drops its tensors. Where the program has
dropped them before, that takes the interpreter; taken while the interpreter is being finalized, it
ends the process by an abort, in eager PyTorch too (pytorch/pytorch#179291). A program that ends
soon after its last collective, on a busy machine, is one whose workers are not that far.
"""

from __future__ import annotations

import time
from pathlib import Path

WORKERS = "pt_gloo_runloop"
"""What torch calls these threads (`ProcessGroupGloo::runLoop`)."""
LIMIT_S = 2.0
PAUSE_S = 0.001


def let_workers_finish() -> None:
    """Leave the interpreter to gloo's workers until none has anything to do, for 2 s at most.

    A worker that waits for another rank has nothing to do.
    """
    deadline = time.monotonic() + LIMIT_S
    n_quiet = 0
    while n_quiet < 2 and time.monotonic() < deadline:
        workers = _states()
        if not workers:
            return
        n_quiet = 0 if "R" in workers else n_quiet + 1
        time.sleep(PAUSE_S)  # who waits for the interpreter has it now


def _states() -> list[str]:
    """What the system says of each worker: R runs or wants to, S sleeps (proc_pid_stat(5))."""
    states = []
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        if name == WORKERS:
            states.append(rest.split()[0])
    return states
