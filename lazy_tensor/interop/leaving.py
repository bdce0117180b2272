"""The end of a process: gloo's threads get time to drop the tensors that they hold.

A worker thread of gloo reports that a collective is done, and drops its tensors only then. If the
program has dropped them before, the worker frees the Python objects, for which it needs the GIL. To
take the GIL while Python is finalized aborts the process, in eager PyTorch too
(pytorch/pytorch#179291). That happens to programs that end soon after their last collective, on a
busy machine. `lazy_tensor/__init__.py` registers `let_workers_finish` with `atexit`.
"""

from __future__ import annotations

import time
from pathlib import Path

WORKERS = "pt_gloo_runloop"
"""The name that torch gives these threads (`ProcessGroupGloo::runLoop`)."""
LIMIT_S = 2.0
"""Most seconds to wait: a worker that never rests must not keep the process alive."""
PAUSE_S = 0.001


def let_workers_finish() -> None:
    """Wait, without the GIL, until no worker of gloo has anything to do, but 2 s at most.

    A worker that waits for another rank sleeps, and has nothing to do.
    """
    deadline = time.monotonic() + LIMIT_S
    # two looks in a row: a worker that waits for the GIL sleeps as well, and gets it in between
    n_quiet = 0
    while n_quiet < 2 and time.monotonic() < deadline:
        workers = _states()
        if not workers:
            return
        n_quiet = 0 if "R" in workers else n_quiet + 1
        # it lets go of the GIL, so that a worker that waits for it goes on
        time.sleep(PAUSE_S)


def _states() -> list[str]:
    """The state of each worker thread: "R" runs or wants to, "S" sleeps (proc_pid_stat(5)). []
    where there is no /proc."""
    states = []
    for path in Path("/proc/self/task").glob("*/stat"):
        # the name stands in parentheses, and may have some itself
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            # the thread has ended meanwhile
            continue
        if name == WORKERS:
            states.append(rest.split()[0])
    return states
