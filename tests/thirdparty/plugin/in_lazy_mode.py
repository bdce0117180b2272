"""A pytest plugin for other projects' suites: the body of each test runs inside `lazy_mode`.

In: the options below. Out: lines of JSON in the file `--lazy-outcomes`: that a test begins, and
what came of it. So a test that takes the process down is known, and a run with the same file goes
on behind it. The plugin imports the installed package, and nothing else of the repository.
"""

from __future__ import annotations

import importlib.util
import json
import random
import time
import zlib
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "default": {"backend": "aten", "compile": "off"},
    "record": {"backend": "aten", "compile": "off", "record": "always"},
    "kernels": {
        "backend": "inductor", "compile": "background", "compile_threshold": 1, "record": "always",
    },
}  # fmt: skip
"""The options of `lazy_mode` that each way has."""

N_EXAMPLES = 4
N_CHARACTERS_OF_AN_ERROR = 6000


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lazy-tensor")
    group.addoption("--lazy-way", choices=WAYS, default="record")
    group.addoption("--lazy-outcomes", type=Path, required=True)
    group.addoption("--lazy-tests", type=Path, help="names of tests: only these, a JSON list")
    group.addoption("--lazy-sample", type=int, default=1, help="one test in so many, by its name")
    group.addoption("--lazy-seconds", type=float, default=float("inf"), help="for the whole run")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if importlib.util.find_spec("hypothesis") is not None:
        _draw_the_same()
    config.pluginmanager.register(_InLazyMode(config), "in-lazy-mode")


def _draw_the_same() -> None:
    import hypothesis  # optional: few suites have it

    hypothesis.settings.register_profile(
        "same", derandomize=True, deadline=None, max_examples=N_EXAMPLES, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    hypothesis.settings.load_profile("same")


class _InLazyMode:
    def __init__(self, config: pytest.Config) -> None:
        self._outcomes: Path = config.getoption("--lazy-outcomes")
        self._wanted = _read_names(config.getoption("--lazy-tests"))
        self._sample: int = config.getoption("--lazy-sample")
        self._ends_at = time.monotonic() + config.getoption("--lazy-seconds")
        self._reports: dict[str, dict[str, Any]] = {}
        options = WAYS[config.getoption("--lazy-way")]
        self._lazy: Any = None
        if options is not None:
            self._lazy = importlib.import_module("lazy_tensor")
            self._lazy.configure(**options)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        begun = self._begun()
        kept = [item for item in items if item.nodeid not in begun and self._wants(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        # where time ends a run, what ran is of all files
        items[:] = sorted(kept, key=lambda item: _number(item.nodeid))

    def _begun(self) -> set[str]:
        if not self._outcomes.exists():
            return set()
        lines = map(json.loads, self._outcomes.read_text().splitlines())
        return {line["begun"] for line in lines if "begun" in line}

    def _wants(self, name: str) -> bool:
        if self._wanted is not None:
            return name in self._wanted
        return _number(name) % self._sample == 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if time.monotonic() > self._ends_at:
            item.session.shouldstop = "the time is up"  # after this one
        self._write({"begun": item.nodeid})
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        _seed(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        _seed(item.nodeid)
        with nullcontext() if self._lazy is None else self._lazy.lazy_mode():
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        new = {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "why": ""}
        of_test = self._reports.setdefault(report.nodeid, new)
        if report.when == "call":
            of_test["seconds"] = report.duration
        if report.failed:
            of_test["outcome"] = "failed"
            of_test["why"] = str(report.longrepr)[-N_CHARACTERS_OF_AN_ERROR:]
        elif report.skipped and of_test["outcome"] == "passed":
            of_test["outcome"] = "skipped"
        if report.when == "teardown":
            self._write(self._reports.pop(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        if self._lazy is not None:
            stats = self._lazy.stats()
            self._write({"recorded": stats["ops"], "at_once": sum(stats["fallbacks"].values())})

    def _write(self, line: dict[str, Any]) -> None:
        with self._outcomes.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _read_names(path: Path | None) -> set[str] | None:
    return None if path is None else set(json.loads(path.read_text()))


def _number(name: str) -> int:
    """A number that a test has in each run, and that says nothing of its file."""
    return zlib.crc32(name.encode())


def _seed(name: str) -> None:
    torch.manual_seed(_number(name))
    random.seed(_number(name))
    if importlib.util.find_spec("numpy") is not None:
        import numpy  # optional

        numpy.random.seed(_number(name))
