"""Writes the tables of options into `docs/options.md`: `python docs/options_table.py`.

In: names, types, defaults and presets as the code has them, and `MEANINGS`. Out: the rows between
two comments of the page. `tests/docs/test_options.py` compares the page with them.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import lazy_tensor.kernels.backend
from lazy_tensor.dispatch.options import AT_LEAST, CHOICES, KNOWN, PRESETS, Forbidden
from lazy_tensor.dispatch.settings import PREFIX, Settings

PAGE = Path(__file__).with_name("options.md")
BEGIN = "<!-- options: written by docs/options_table.py -->"
END = "<!-- options: end -->"

MEANINGS = {
    "backend": "What makes the kernels: `auto` uses the first backend that can run, `aten` runs op "
    "by op and equals eager bit for bit.",
    "compile": "When kernels are built: `background` runs op by op until a kernel is ready, "
    "`blocking` waits for it, `off` builds none.",
    "cache_dir": "The folder that keeps compiled kernels for later processes.",
    "segment_cache_size": "How many compiled segments, and how many recorded traces, stay in "
    "memory.",
    "schema_cache_size": "For how many calls the shapes and dtypes of the results stay in memory.",
    "sharding_cache_size": "How many decisions on calls of sharded tensors stay in memory.",
    "bucket_bytes": "Small all-reduces that one call on sharded tensors needs are joined up to "
    "this size.",
    "max_segment_ops": "A trace is flushed when it has this many ops.",
    "max_pending_bytes": "A trace is flushed when its results need this much memory.",
    "remat_interval": "Backward computes cheap values again instead of keeping them, at most this "
    "many saved values in a row.",
    "flush_policy": "When the device gets the ops: `at_materialization` waits for a flush, "
    "`at_once` hands over at each op that isn't fused, `auto` depends on the device.",
    "record": "`auto` records sequences of ops that ran before, unless eager is faster; `always` "
    "records each op that can be recorded, from the first one on.",
    "sizes": "Whether a plan of `replay` is for `fixed` sizes, or for `any`: that is new, and "
    "misses some things that depend on sizes.",
    "compile_threshold": "How often a segment runs before its kernel is built in the background.",
    "verify_every": "One in this many runs of a kernel is repeated op by op and compared, and a "
    "kernel that differs is dropped.",
    "forbid": "Events that raise an error at your line instead of happening unasked.",
    "debug": "Each op runs when it is recorded, so that an error has eager's traceback.",
    "warn": "A warning appears once if recording is off, or if hardly anything repeats for ten "
    "seconds.",
    "mode": "Sets several options at once, as [the presets](#presets) say; options that are given "
    "beside it win.",
}
"""What each option does, in one sentence of Markdown."""


def page_with_table(page: str) -> str:
    """The text of the page, with the table as the code has it now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n### Presets\n\n{presets()}\n{END}{after}"


def table() -> str:
    head = ("option", "meaning", "default", "accepts", "environment")
    rows = [
        (f"`{name}`", MEANINGS[name], default(name), accepted(name), f"`{PREFIX}{name.upper()}`")
        for name in KNOWN
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def presets() -> str:
    """What each `mode` sets."""
    lines = []
    for mode, values in PRESETS.items():
        sets = ", ".join(f"`{name}={value!r}`".replace("'", '"') for name, value in values.items())
        lines.append(f'- `mode="{mode}"` sets {sets}.\n')
    return "".join(lines)


def accepted(name: str) -> str:
    """What values an option may have."""
    if name == "backend":
        return f"{_listed(('auto', *own_backends()))}, or a registered name"
    if name in CHOICES:
        return _listed(CHOICES[name])
    if name in AT_LEAST:
        what = "a number of bytes" if name.endswith("_bytes") else "a whole number"
        off = "; 0 is off" if AT_LEAST[name] == 0 else ""
        return f"{what}, at least {AT_LEAST[name]}{off}"
    others = {"cache_dir": "a path", "forbid": f"any of {_listed(get_args(Forbidden))}"}
    return others.get(name, "`True` or `False`")


def own_backends() -> list[str]:
    """The backends of this package, without those that the process has registered besides."""
    known = lazy_tensor.kernels.backend._backends
    return [name for name, it in known.items() if type(it).__module__.startswith("lazy_tensor.")]


def default(name: str) -> str:
    if name == "mode":
        return "none"
    if name == "cache_dir":
        return "`~/.cache/lazy_tensor`"
    (found,) = [field.default for field in fields(Settings) if field.name == name]
    return shown(found, is_size=name.endswith("_bytes"))


def shown(value: Any, *, is_size: bool) -> str:
    """A value as a reader wants it: sizes in MiB or GiB."""
    if isinstance(value, frozenset):
        return _listed(sorted(value)) or "none"
    if is_size:
        return f"{value >> 30} GiB" if value >= 1 << 30 else f"{value >> 20} MiB"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _listed(words: Any) -> str:
    return ", ".join(f'`"{word}"`' for word in words)


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
