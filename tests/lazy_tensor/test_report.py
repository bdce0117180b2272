"""`explain`: what it says of segments, of what was new, of what would help; as text, as a page."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributions import Categorical, Distribution
from torch.profiler import ProfilerActivity, profile, record_function

import lazy_tensor
from lazy_tensor import explain, lazy_mode, reset_stats
from lazy_tensor.dispatch.options import Options
from lazy_tensor.dispatch.run import input_snapshots
from lazy_tensor.dispatch.stats import COUNTED
from lazy_tensor.report import Report
from lazy_tensor.reports import advice, text
from lazy_tensor.reports.flushes import amount
from tests.processes import run_python

A, B, C = torch.ones(4, 64), torch.ones(4, 65), torch.ones(4, 64, dtype=torch.int64)
COMPILED: Options = {"backend": "inductor", "compile": "blocking"}


def normed(x):
    return torch.nn.functional.layer_norm(x.sin() + 1, x.shape[-1:])


@pytest.fixture(autouse=True)
def _nothing_before():
    reset_stats()


def line_of(text):
    """The number of the line of this file on which `text` stands."""
    with open(__file__) as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_function_is_explained_segment_by_segment():
    x = torch.rand(64, 32)
    with lazy_mode(**COMPILED):
        report = explain(normed, x)
    assert torch.allclose(lazy_tensor.materialize(report.result), normed(x), atol=1e-5)
    (flush,) = report.flushes
    (step,) = flush.steps
    assert step.is_segment
    assert [op.name for op in step.ops] == [
        "aten.sin.default", "aten.add.Tensor", "aten.native_layer_norm.default"
    ]  # fmt: skip
    assert step.lines == f"test_report.py:{line_of('x.sin() + 1')}"
    assert step.takes == ("f32[64, 32]",)
    assert step.gives == ("f32[64, 32]",)
    assert step.n_bytes == 2 * x.nbytes
    assert step.n_bytes_saved >= x.nbytes  # sin, or its sum
    assert step.seconds is not None
    assert step.seconds > 0
    assert step.status in ("inductor", "aten")  # without a C++ compiler


def test_calls_that_are_not_fused_say_why():
    def product(a):
        return a @ a

    with lazy_mode(**COMPILED):
        report = explain(product, torch.rand(4, 4))
    (step,) = report.flushes[-1].steps
    assert not step.is_segment
    assert "a matrix product is a library call" in step.reason
    assert f"not fused, because {step.reason}: mm at test_report.py:" in str(report)


def test_only_the_function_is_reported_on():
    with lazy_mode():
        torch.ones(3) + 1
    report = explain(normed, torch.rand(2, 3))
    assert len(report.records) == 1
    assert len(explain().records) == 2


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (lambda: torch.ones(4, 64).cos(), lambda: torch.ones(4, 65).cos(), "'size' of aten.ones"),
        (lambda: A.cos(), lambda: B.cos(), "size of dim 1 went 64 -> 65 of 'self' of aten.cos"),
        (lambda: A.cos(), lambda: A.double().cos(), ".to() at "),
        (lambda: A.cos(), lambda: A.half().cos(), "where aten.cos.default at"),
        (lambda: A.cos(), lambda: C.cos(), "dtype went float32 -> int64"),
        (lambda: A.cos() * 2.5, lambda: A.cos() * 3.5, "'other' of aten.mul.Tensor"),
        (lambda: A.sum(0), lambda: A.sum(1), "'dim' of aten.sum.dim_IntList"),
        (lambda: A.cos(), lambda: A.cos().sin(), "where it ended before"),
    ],
)
def test_what_was_new_is_told_against_the_nearest_known_path(before, now, told):
    lazy_tensor.cache_clear()
    for program in (before, before, now):
        with lazy_mode():
            program()
    first, second, third = explain().flushes
    assert first.miss == "it is seen for the first time"
    assert second.miss == ""
    assert told in third.miss
    assert f"{__file__}:{line_of('lambda: A.sum(0)') if 'sum' in told else ''}" in third.miss


def test_equal_new_lines_are_one_with_a_count():
    records = []
    for _ in range(3):
        lazy_tensor.cache_clear()
        with lazy_mode():
            normed(torch.ones(2, 3))
        records += explain().records[-1:]
    told = [line for line in str(Report(records)).splitlines() if "    new: " in line]
    assert told == ["    new: it is seen for the first time (3×)"]


def test_advice_ends_in_a_difference_or_not_at_all():
    for n in range(6):
        lazy_tensor.cache_clear()
        with lazy_mode():
            torch.ones(n + 1).cos().sin()
    (told,) = [one.text for one in explain().advice if "not seen before" in one.text]
    assert told.endswith("recorded and planned anew")


def test_counters_are_all_there_from_the_start():
    program = """
import json, torch, lazy_tensor
from lazy_tensor import lazy_mode, replay, stats
keys = lambda: {name: sorted(value) if name == "regions_s" else type(value).__name__
                for name, value in stats().items()}
before = keys()
assert stats()["flush_causes"]["exit"] == stats()["fallbacks"]["mm"] == 0
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Dropout())
optimizer = torch.optim.Adam(model.parameters())
def step(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
replayed = replay(step)
for i in range(8):
    replayed(torch.ones(4, 4))
for i in range(300):
    with lazy_mode(max_segment_ops=9):
        step(torch.ones(i % 20 + 1, 4))
        torch.ones(3).nonzero()
        torch.ones(3, 3).to_sparse()
for _ in range(99):
    with lazy_mode():
        pass
assert stats()["replayed"] and stats()["flush_causes"]["exit"]
after = keys()
lazy_tensor.reset_stats()
assert before == after == keys(), (before, after, keys())
"""
    run_python("-c", program)


def test_every_counter_has_its_name_in_the_list():
    root = Path(__file__).parents[2]
    sources = [p for f in ("dispatch", "lazy_tensor", "sharding") for p in (root / f).rglob("*.py")]
    named = {
        name
        for path in sources
        for name in re.findall(r"\bcounts\[\"(\w+)\"\] \+= ", path.read_text())
    }
    assert "ops" in named
    assert named == set(COUNTED)


def test_a_value_read_in_the_middle_of_every_step_is_the_advice(monkeypatch):
    monkeypatch.setattr(advice, "WORTH_SAYING", 0.0)  # on a busy machine other things take long
    weight = torch.rand(8, 8)

    def step():
        with lazy_mode(compile="off"):
            norm = (weight @ weight).norm()
            if norm.item() > 0:  # in the middle
                weight.mul_(0.5)

    for _ in range(6):
        step()
    (found, *_) = [one for one in explain().advice if "needs values" in one.text]
    assert 0 < found.share <= 1
    assert f"`if norm.item() > 0:  # in the middle` at test_report.py:{line_of('in the midd')}" in (
        found.text
    )


def test_checks_by_distributions_are_advised_to_be_left_out(monkeypatch):
    monkeypatch.setattr(advice, "WORTH_SAYING", 0.0)
    monkeypatch.setattr(advice, "MOST", 9)
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile leaves it off for all
    logits = torch.randn(64, 3)
    for _ in range(6):
        with lazy_mode(record="always", compile="off"):
            Categorical(logits=logits * 2).log_prob(torch.ones(64)).sum()
    (found,) = [one for one in explain().advice if "torch.distributions" in one.text]
    assert f"at test_report.py:{line_of('Categorical(logits')}, which" in found.text
    assert "set_default_validate_args(False)" in found.text
    assert not [one for one in explain().advice if "Move it" in one.text]


def test_torchs_own_logging_shows_ours():
    """torch imports the package then, while torch itself is being imported."""
    program = "import torch, lazy_tensor\nwith lazy_tensor.lazy_mode():\n    torch.ones(3) + 1\n"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"TORCH_LOGS": "+lazy_tensor"},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "exit: 2 ops" in done.stderr


def test_only_the_latest_kinds_of_flushes_are_shown():
    for n in range(1, 12):
        with lazy_mode():
            for _ in range(n):
                torch.ones(3).sin()
    told = str(explain())
    assert "11 times" not in told
    assert "3 earlier flushes did other things" in told


def test_lengths_that_change_are_in_the_advice():
    lazy_tensor.cache_clear()
    for n in range(40, 60):
        with lazy_mode():
            torch.ones(n).cos().sin()
    (found, *_) = [one.text for one in explain().advice if "program not seen before" in one.text]
    assert f"{Path(__file__).parent}/" not in found


def test_a_call_that_cannot_be_recorded_is_in_the_report(monkeypatch):
    monkeypatch.setattr(text, "WORTH_SHOWING", 0.0)
    monkeypatch.setattr(input_snapshots, "PRODUCT_BYTES", 0)
    x = lazy_tensor.wrap(torch.rand(300, 300))
    array = x.numpy()  # whoever has it may write it at any time
    for _ in range(3):
        (x @ x).cos().sum().item()
    del array
    told = [line for line in str(explain()).splitlines() if line.startswith("at once: ")]
    assert f"aten.mm.default at {__file__}:{line_of('(x @ x)')}" in told[0]
    assert "handed out" in told[0]


def test_nothing_to_report_is_said():
    gc.collect()  # what other tests replayed
    report = explain()
    assert str(report) == "nothing was flushed yet"
    assert report.advice == []


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match="fn=3 can't be called"):
        explain(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must end in .html or .json"):
        explain().save(tmp_path / "report.txt")


def page_with(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))

    def step(x):
        model.zero_grad()
        model(x).square().mean().backward()

    for n in (4, 4, 5):
        with lazy_mode():
            step(torch.ones(n, 8))
    path = tmp_path / "report.html"
    explain().save(path)
    return path


def test_the_page_needs_nothing_else(tmp_path):
    page = page_with(tmp_path).read_text()
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    flushes = json.loads(data)["flushes"]
    assert [bool(flush["miss"]) for flush in flushes] == [True, False, True]
    steps = flushes[1]["steps"]
    assert all(0 <= j < i for i, step in enumerate(steps) for j in step["needs"])
    assert "<iframe srcdoc=" in explain()._repr_html_()


def test_lanes_are_written_for_trace_viewers(tmp_path):
    def step(n):
        with lazy_mode(**COMPILED):
            return normed(torch.rand(n, 3)) - 4.25

    for n in (2, 2, 2):
        step(n)
    path = tmp_path / "trace.json"
    explain().save(path)
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"MainThread: record", "MainThread: plan", "MainThread: run"} <= lanes
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["dur"] >= 0 for span in spans)
    assert sum(span["name"].startswith("exit at") for span in spans) == 6


def test_the_page_in_a_browser(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no Chromium here")
    path = page_with(tmp_path)
    problems = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: problems.extend([asked.url] * ("http" in asked.url)))
        page.goto(path.as_uri())
        assert page.locator("#flushes button").count() == 2  # the two that were new did the same
        assert page.locator("#timeline rect").count() >= 6
        page.locator("#flushes button").nth(1).click()
        boxes = page.locator("#picture g[data-step]")
        assert boxes.count() >= 3
        boxes.first.click()
        assert "test_report.py" in page.locator("#detail").inner_text()
        page.set_viewport_size({"width": 400, "height": 800})
        page.reload()
        box = page.locator("#picture g[data-step]").first.bounding_box()
        assert box is not None
        assert box["width"] >= 185, "texts are as large as on a wide screen"
        before = page.locator("#picture").get_attribute("viewBox")
        page.locator("#picture").hover()
        page.mouse.wheel(0, -400)
        page.wait_for_function(
            "old => document.getElementById('picture').getAttribute('viewBox') !== old", arg=before
        )
        browser.close()
    assert problems == []


def test_rich_prints_it():
    console = pytest.importorskip("rich.console").Console(record=True, width=200, file=None)
    normed_report = explain(normed, torch.rand(2, 3))
    with console.capture() as captured:
        console.print(normed_report)
    assert "last 1 flushes" in captured.get()


def test_the_profiler_shows_flushes_and_segments_by_name():
    def step():
        with lazy_mode(**COMPILED):
            return normed(torch.rand(8, 8))

    step()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        step()
    names = {event.key for event in profiled.key_averages()}
    assert "lazy_tensor flush: exit" in names
    assert any(name.startswith("lazy_tensor segment sin, add, native_layer_norm") for name in names)


def test_the_users_ranges_are_where_the_work_is():
    x = torch.rand(200, 200)

    def step():
        with lazy_mode():
            with record_function("outer"):
                with record_function("product"):
                    y = x @ x
                z = y.cos()
                z.sum().item()  # the range goes on after a flush
                w = z @ x
            return w.sin()

    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            step()
    inside: dict[str, set[str]] = {"outer": set(), "product": set()}
    for event in profiled.events():
        around = [parent.name for parent in parents(event)]
        if any(name.startswith("lazy_tensor flush") for name in around):
            for name in inside.keys() & around:
                inside[name].add(event.name)
    assert {"aten::mm", "aten::cos"} <= inside["outer"]
    assert "aten::sin" not in inside["outer"]
    assert "aten::mm" in inside["product"]
    assert "aten::cos" not in inside["product"]


def parents(event):
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def test_errors_under_observation_are_the_same():
    index = torch.tensor([7])

    def bad():
        a = torch.ones(5).cos()
        return a[index] + 1

    with pytest.raises(IndexError) as observed:
        explain(bad)
    assert "recorded at" in str(observed.value.__notes__)


def test_what_ran_before_a_reset_is_not_told():
    @lazy_tensor.replay
    def double(x):
        return x * 2

    def run():
        with torch.no_grad():
            for _ in range(8):
                double(torch.ones(3))

    run()
    assert "double): 5 calls replayed" in str(explain())
    lazy_tensor.reset_stats()
    assert "double)" not in str(explain())
    run()
    assert "double): 13 calls replayed" in str(explain())


UNBUILT: Options = {
    "record": "always", "backend": "inductor", "compile": "background",
    "compile_threshold": 1 << 20,
}  # fmt: skip


def test_equal_segments_are_one_line():
    x = torch.rand(4, 4)
    for _ in range(3):
        with lazy_mode(**UNBUILT):
            y = x
            for _ in range(20):
                y = (y @ y).sin().cos()
    (line,) = re.findall(r".* 2 ops.*; sin, cos; .*", str(explain()))
    assert line.endswith("read and written (20×)")


def test_of_many_segments_the_largest_are_told():
    x = torch.rand(4, 4)
    for _ in range(3):
        with lazy_mode(**UNBUILT):
            y = x
            for n in range(1, 20):
                y = y @ y
                for _ in range(n):
                    y = y.sin()
    assert "and 6 segments that move less: 99 ops; " in str(explain())


def test_amounts_are_shown_in_the_unit_that_they_round_to():
    shown = [amount(n) for n in (1023, 1024, 1_048_524, 1_048_575, 2**30 - 1, 2**50)]
    assert shown == ["1023 B", "1.0 KiB", "1023.9 KiB", "1.0 MiB", "1.0 GiB", "1024.0 TiB"]
