"""The package's loggers, one for each kind of event.

`LAZY_TENSOR_LOGS=flushes,misses` writes them to stderr, in the manner of `TORCH_LOGS`. The names
are those below, and "all" means every one. A program that sets up `logging` itself finds them under
`lazy_tensor.`.
"""

from __future__ import annotations

import logging
import sys

NAMES = ("compiles", "fallbacks", "flushes", "misses")
COMPILES, FALLBACKS, FLUSHES, MISSES = (logging.getLogger(f"lazy_tensor.{name}") for name in NAMES)


def show(names: str) -> list[str]:
    """Write the loggers in `names`, separated by commas, to stderr. Return the unknown names."""
    asked = set(names.replace(" ", "").split(",")) - {""}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    for name in NAMES:
        if name in asked or "all" in asked:
            logger = logging.getLogger(f"lazy_tensor.{name}")
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)
            # else a program that has set up the root logger would show each message twice
            logger.propagate = False
    return sorted(asked - {"all", *NAMES})
