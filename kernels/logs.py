"""The package's loggers: what happens, while it happens.

`LAZY_TENSOR_LOGS=flushes,misses` shows them on stderr, in the manner of `TORCH_LOGS`; the names are
those below, "all" stands for every one. A program that sets up `logging` itself finds them under
`lazy_tensor.`.
"""

from __future__ import annotations

import logging
import sys

NAMES = ("compiles", "fallbacks", "flushes", "misses")
COMPILES, FALLBACKS, FLUSHES, MISSES = (logging.getLogger(f"lazy_tensor.{name}") for name in NAMES)


def show(names: str) -> list[str]:
    """Write what these loggers say to stderr; names stand between commas. Return unknown ones."""
    asked = set(names.replace(" ", "").split(",")) - {""}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    for name in NAMES:
        if name in asked or "all" in asked:
            logger = logging.getLogger(f"lazy_tensor.{name}")
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)
            logger.propagate = False
    return sorted(asked - {"all", *NAMES})
