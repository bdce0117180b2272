import asyncio
import dataclasses
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch.nn.utils import rnn

from lazy_tensor import (
    LazyTensor,
    configure,
    is_pending,
    lazy_mode,
    materialize,
    replay,
    reset_stats,
    stats,
    wrap,
)
from lazy_tensor.capture.replay import OWN_OPTIONS, Replay, ReplayOptions
from lazy_tensor.dispatch import options, settings
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.tiering import policy
from lazy_tensor.dispatch.trie.trace import local


def test_is_reentrant_and_only_the_outermost_exit_leaves():
    x = torch.ones(3)
    with lazy_mode():
        with lazy_mode():
            y = x + 1
        z = y + 1
        assert isinstance(z, LazyTensor)
    assert type(x + 1) is torch.Tensor
    assert materialize(z).tolist() == [3.0] * 3


def test_decorates_a_function():
    @lazy_mode()
    def double(x):
        return x * 2

    assert materialize(double(torch.ones(2))).tolist() == [2.0, 2.0]


def test_decorates_a_function_without_parentheses():
    @lazy_mode
    def double(x: torch.Tensor) -> torch.Tensor:
        "Twice."
        assert is_pending(x * 2)
        return x * 2

    assert materialize(double(torch.ones(2))).tolist() == [2.0, 2.0]
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert list(inspect.signature(double).parameters) == ["x"]
    assert materialize(lazy_mode(double, compile="off")(torch.ones(1))).item() == 2.0


def batches():
    yield torch.ones(2)


async def awaited():
    return torch.ones(2)


@pytest.mark.parametrize("function", [batches, awaited])
def test_what_runs_later_can_t_be_decorated(function):
    with pytest.raises(TypeError, match=f"a call of {function.__name__} runs nothing yet; put"):
        lazy_mode(function)


def is_recorded():
    with lazy_mode(record="always"):
        return is_pending(torch.ones(2) + 1)


def test_blocks_of_tasks_overlap():
    async def task(k):
        with lazy_mode():
            x = torch.ones(2) * k
            await asyncio.sleep(0)
            y = x + 1
        with lazy_mode(max_segment_ops=5 + k):
            await asyncio.sleep(0)
        return y.tolist()

    async def all_tasks():
        return await asyncio.gather(*[task(k) for k in range(3)])

    for _ in range(40):  # in which blocks may be bypassed
        assert asyncio.run(all_tasks()) == [[k + 1.0] * 2 for k in range(3)]
        assert settings.of_block() is None
        assert is_recorded()


def test_options_of_a_block_hold_while_another_one_ends():
    first, second = lazy_mode(max_segment_ops=5), lazy_mode(max_segment_ops=6)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings.current().max_segment_ops == 6
    assert is_pending(torch.ones(2) + 1)
    second.__exit__(None, None, None)
    assert settings.of_block() is None
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_a_generator_that_is_dropped_in_its_block():
    def ones():
        with lazy_mode():
            for _ in range(2):
                yield torch.ones(2) * 2

    first, second = ones(), ones()
    next(first), next(second)
    del first
    gc.collect()
    assert is_pending(torch.ones(2) + 1)
    del second
    gc.collect()
    assert type(torch.ones(2) + 1) is torch.Tensor
    assert is_recorded()


class Model:
    def __init__(self) -> None:
        self.factor = 3

    @lazy_mode
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        assert is_pending(x * 2)
        return x * self.factor


@lazy_mode
def of_module(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_decorates_a_method_and_can_be_pickled_without_parentheses():
    assert materialize(Model().scaled(torch.ones(2))).tolist() == [3.0, 3.0]
    assert pickle.loads(pickle.dumps(of_module)) is of_module


def test_an_option_without_its_name_is_told():
    with pytest.raises(TypeError, match="function='off' can't be called; options have names, as"):
        lazy_mode("off")  # type: ignore[call-overload]


def test_options_hold_for_the_block():
    before = settings.current()
    with lazy_mode(max_segment_ops=7):
        assert settings.current().max_segment_ops == 7
    assert settings.current() == before


def test_blocks_that_are_bypassed_are_counted_without_python(monkeypatch):
    """Empty ones are, whatever they take."""
    if hits.native is None:
        pytest.skip(hits.status())
    with lazy_mode():
        torch.ones(2) + 1  # C++ sees this thread from its first op on
    monkeypatch.setattr(policy.Policy, "has_wrapped", False)  # of tests before
    configure(record="auto")
    looked_at, rests = [], lazy_mode._rests

    def counted(*args):
        looked_at.append(args)
        return rests(*args)

    monkeypatch.setattr(lazy_mode, "_rests", counted)
    before = stats()["unrecorded_blocks"]
    for _ in range(3000):
        with lazy_mode():
            pass
    assert len(looked_at) < 1500
    local.trace.policy.account_rests()
    assert stats()["unrecorded_blocks"] > before + 1500


def test_a_block_in_one_that_rests_leaves_its_time_alone(monkeypatch):
    if hits.native is None:
        pytest.skip(hits.status())
    with lazy_mode():
        torch.ones(2) + 1
    monkeypatch.setattr(policy.Policy, "has_wrapped", False)
    configure(record="auto")

    def run(n):
        with lazy_mode():
            if n % 20 == 0:
                with lazy_mode():
                    pass

    reset_stats()
    for n in range(8000):
        run(n)
    local.trace.policy.account_rests()
    assert sum(STATS.regions_s.values()) < 600  # seconds: not those since the machine began


def test_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match="unknown option 'enabled'; to record nothing"):
        lazy_mode(enabled=False)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unknown option 'backened'; did you mean 'backend'"):
        lazy_mode(backened="aten")  # type: ignore[call-overload]


def test_unknown_backend_names_those_there_are():
    with pytest.raises(ValueError, match=r"configure\(\): backend='nvfuzer' is not one of 'auto'"):
        configure(backend="nvfuzer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "lazy"}, "compile='lazy' is not one of 'background', 'blocking', 'off'"),
        ({"max_segment_ops": 0}, "max_segment_ops=0 must be at least 1"),
        ({"verify_every": -1}, "verify_every=-1 must be at least 0"),
        ({"forbid": "flushes"}, "forbid='flushes' is not one of 'flush', 'compile'"),
    ],
)
def test_bad_values_name_the_option_and_what_it_takes(options, message):
    before = settings.current()
    with pytest.raises(ValueError, match=message):
        configure(**options)
    assert settings.current() == before


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"compile": "blockng"}, "did you mean 'blocking'"),
        ({"compile": False}, "compile=False is not one of 'background', 'blocking', 'off'"),
        ({"backend": "Inductor"}, "did you mean 'inductor'"),
        ({"record": False}, "to record nothing, don't enter lazy_mode"),
        ({"forbid": "flushes"}, "did you mean 'flush'"),
        ({"forbid": True}, "not a set of any of 'flush', 'compile'"),
        ({"forbid": [["flush"]]}, r"forbid=\[\['flush'\]\] is not a set of any of 'flush'"),
        ({"cache_dir": None}, "cache_dir=None is not a folder's path"),
        ({"cache_dir": ""}, "cache_dir='' is not a folder's path"),
        ({"verify_every": False}, r"verify_every=False is not a whole number \(0 is off\)"),
        ({"max_segment_ops": "many"}, "max_segment_ops='many' is not a whole number"),
        ({"debug": "maybe"}, "debug='maybe' is not a boolean; use 0 or 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [configure, lazy_mode, replay], ids=lambda f: f.__name__)
def test_bad_values_get_the_word_that_was_meant(function, options, hint):
    arguments = (len,) if function is replay else ()
    before = settings.current()
    with pytest.raises((TypeError, ValueError), match=hint) as raised:
        function(*arguments, **options)
    assert str(raised.value).startswith(f"{function.__name__}(): ")
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    assert settings.current() == before


def test_replay_names_its_own_options_too():
    with pytest.raises(TypeError, match="'cuda_graph'; did you mean 'cuda_graphs'"):
        replay(len, cuda_graph=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'warm_up'; did you mean 'warmup'"):
        replay(len, warm_up=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'backened'; did you mean 'backend'"):
        replay(len, backened="aten")  # type: ignore[call-overload]


def test_typed_options_are_those_of_the_settings():
    held, given = get_type_hints(settings.Settings), get_type_hints(options.Options)
    assert get_args(given.pop("mode")) == tuple(options.PRESETS)
    assert [f.name for f in dataclasses.fields(settings.Settings) if f.init] == list(given)
    wider = {"cache_dir": str | os.PathLike[str], "forbid": given["forbid"]}
    assert given == {name: wider.get(name, held[name]) for name in given}
    assert frozenset(get_args(get_args(get_args(given["forbid"])[1])[0])) == {
        "flush", "compile", "fallback", "redistribute"
    }  # fmt: skip
    assert {*options.CHOICES, *options.AT_LEAST} <= {*given, "mode"}
    for function in (configure, lazy_mode.__init__):
        assert inspect.signature(function).parameters["options"].annotation == "Unpack[Options]"


def test_typed_options_of_replay_are_its_own_and_those_of_the_mode():
    given = get_type_hints(ReplayOptions)
    assert {*given} == {*OWN_OPTIONS, *options.KNOWN}
    own = get_type_hints(Replay.__init__)
    assert {name: given[name] for name in OWN_OPTIONS} == {name: own[name] for name in OWN_OPTIONS}


def test_a_preset_sets_its_options_under_those_given_beside_it():
    with lazy_mode(compile="off", mode="fast"):
        now = settings.current()
        assert (now.record, now.compile, now.remat_interval) == ("always", "off", 4)
        with lazy_mode(mode="exact"):
            assert (settings.current().backend, settings.current().record) == ("aten", "always")
        with lazy_mode(mode="default"):
            defaults, now = settings.Settings(), settings.current()
            assert all(
                getattr(now, name) == getattr(defaults, name)
                for values in options.PRESETS.values()
                for name in values
            )


def test_a_preset_comes_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("LAZY_TENSOR_MODE", "fast")
    monkeypatch.setenv("LAZY_TENSOR_COMPILE", "off")
    found = settings.from_environment()
    assert (found.record, found.compile, found.remat_interval) == ("always", "off", 4)


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ValueError, match=r"mode='fats' is not one of .*; did you mean 'fast'\?"):
        lazy_mode(mode="fats")  # type: ignore[call-overload]


def test_options_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LAZY_TENSOR_COMPILE", "off")
    monkeypatch.setenv("LAZY_TENSOR_FORBID", "flush,compile")
    monkeypatch.setenv("LAZY_TENSOR_DEBUG", "1")
    found = settings.from_environment()
    assert found.compile == "off"
    assert found.forbid == {"flush", "compile"}
    assert found.debug


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("LAZY_TENSOR_COMPIEL", "off", "LAZY_TENSOR_COMPIEL .*mean LAZY_TENSOR_COMPILE?"),
        ("LAZY_TENSOR_LOG", "all", "LAZY_TENSOR_LOG .*mean LAZY_TENSOR_LOGS?"),
        ("LAZY_TENSOR_XYZZY", "1", "LAZY_TENSOR_XYZZY .*after LAZY_TENSOR_ come BACKEND, "),
        ("LAZY_TENSOR_COMPILE", "bakground", "LAZY_TENSOR_COMPILE='bakground' .*mean 'background'"),
        ("LAZY_TENSOR_MAX_SEGMENT_OPS", "1e3", "LAZY_TENSOR_MAX_SEGMENT_OPS='1e3' is not a whole"),
        ("LAZY_TENSOR_DEBUG", "maybe", "LAZY_TENSOR_DEBUG='maybe' is not a boolean; use 0 or 1"),
        ("LAZY_TENSOR_FORBID", "flush,all", "LAZY_TENSOR_FORBID='all' is not one of 'flush'"),
        ("LAZY_TENSOR_BACKEND", "inducter", "LAZY_TENSOR_BACKEND='inducter' .*mean 'inductor'"),
        ("LAZY_TENSOR_HITS", "pyhton", "LAZY_TENSOR_HITS='pyhton' is not 'python'"),
    ],
)
def test_a_bad_variable_warns_by_its_name_and_is_ignored(variable, value, told):
    with pytest.warns(UserWarning, match=f"{told}.*") as warned:
        found = settings.from_environment({variable: value})
    assert "ignored" in str(warned[0].message)
    assert len(warned) == 1
    assert found == settings.Settings()


def test_an_empty_variable_is_none():
    assert settings.from_environment({"LAZY_TENSOR_COMPILE": ""}) == settings.Settings()


def test_every_variable_of_the_repository_is_known():
    root = Path(__file__).parents[2]
    files = [
        path
        for folder in ("benches", "dispatch", "docs", "kernels", "lazy_tensor", "sharding", ".ci")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".md", "") and path.is_file()
    ]
    files += [root / "Makefile", root / "README.md", *(root / "tests").rglob("conftest.py")]
    named = {
        name
        for path in files
        for name in re.findall(r"LAZY_TENSOR_([A-Z_]*[A-Z])\b", path.read_text())
    }
    assert "START_S" in named
    assert named <= {*map(str.upper, options.KNOWN), *settings.OTHER_VARIABLES}


BAD = {"LAZY_TENSOR_COMPILE": "yes", "LAZY_TENSOR_NAME": "x", "LAZY_TENSOR_LOGS": "flushs"}


@pytest.mark.parametrize("way", ["default", "error", "ignore"])
def test_bad_variables_never_break_the_import(way):
    program = "import lazy_tensor; print(lazy_tensor.stats()['ops'])"
    done = subprocess.run(
        [sys.executable, "-W", way, "-c", program], env={**os.environ, **BAD},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    for variable in BAD:
        assert done.stderr.count(variable) == (way != "ignore"), done.stderr


def test_forbidden_compile_computes_all_the_same():
    x = torch.randn(3)

    def program():
        with lazy_mode(backend="inductor", compile="background", forbid={"compile"}):
            return x.sin().cos()

    program()  # at first sight there is no plan
    with pytest.raises(RuntimeError, match="a segment without a kernel .*aten.sin.default"):
        program()


def test_forbidden_fallback_names_op_and_reason():
    x = torch.ones(2, 2)
    with lazy_mode(forbid={"fallback"}):
        y = x + 1
        with pytest.raises(RuntimeError, match="can't be recorded .*forbid has 'fallback'"):
            y.to_sparse()


def test_inplace_on_plain_tensor_is_seen_after_the_block():
    x = torch.zeros(4)
    with lazy_mode():
        x.add_(1)
        x[1:3].mul_(5)
    assert x.tolist() == [1.0, 5.0, 5.0, 1.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.numpy().tolist(),
        lambda t: t.tolist(),
        lambda t: torch.utils.dlpack.from_dlpack(t).clone().tolist(),
        lambda t: list(t.untyped_storage())[:1] and t.tolist(),
        lambda t: eval(repr(t).replace("tensor", "")),
        lambda t: [t[0].item(), t[1].item()],
    ],
    ids=["numpy", "tolist", "dlpack", "storage", "repr", "item"],
)
def test_inplace_on_plain_tensor_is_seen_by_reads_that_do_not_dispatch(read):
    x = torch.zeros(2)
    with lazy_mode():
        x.add_(1)
        assert read(x) == [1.0, 1.0]


def test_exception_in_the_block_loses_nothing():
    x = torch.zeros(2)
    results = []

    @lazy_mode()
    def program():
        x.add_(1)
        results.append(x * 2)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        program()
    assert x.tolist() == [1.0, 1.0]
    assert results[0].tolist() == [2.0, 2.0]


def test_data_assignment_takes_a_lazy_value():
    p = torch.nn.Parameter(torch.ones(3))
    with lazy_mode():
        p.data = p.data * 2
        q = p + 1
    assert p.tolist() == [2.0] * 3
    assert q.tolist() == [3.0] * 3


def test_a_bound_flushes_by_itself():
    x = torch.zeros(3)
    with lazy_mode(max_segment_ops=10):
        for _ in range(35):
            x = x + 1
        assert is_pending(x)
    assert x.tolist() == [35.0] * 3
    assert stats()["flush_causes"]["max_segment_ops"] == 3


def test_pending_bytes_are_bounded():
    x = torch.zeros(1024)
    with lazy_mode(max_pending_bytes=8 * 4096):
        for _ in range(20):
            x = x + 1
    assert x[0].item() == 20
    assert stats()["flush_causes"]["max_pending_bytes"] == 2


def test_forbidden_flush_names_the_users_line():
    x = torch.ones(3)
    with lazy_mode(forbid={"flush"}):
        y = x.sum()
        with pytest.raises(RuntimeError, match=r"test_mode.py:\d+ needs values that are pending"):
            y.item()
    assert y.item() == 3.0


def test_default_dtype_set_inside_counts_from_there_on():
    x = torch.arange(3)
    with lazy_mode():
        a = x * 1.5
        torch.set_default_dtype(torch.float64)
        try:
            b = x * 1.5
        finally:
            torch.set_default_dtype(torch.float32)
        c = x * 1.5
    assert (a.dtype, b.dtype, c.dtype) == (torch.float32, torch.float64, torch.float32)


def test_inference_mode_inside():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = model(x)
        with lazy_mode():
            y = model(x)
            assert is_pending(y)
    assert torch.equal(materialize(y), expected)


def test_debug_runs_each_op_as_it_is_recorded():
    with lazy_mode(debug=True):
        y = torch.ones(3) + 1
        assert not is_pending(y)
    assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_packed_sequences(kind):
    torch.manual_seed(0)
    model, x = kind(3, 5, batch_first=True), torch.randn(4, 6, 3)

    def program():
        lengths = torch.tensor([5, 3, 2, 0]) + 1
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)
        padded, n_steps = rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        padded.sum().backward()
        gradient, model.weight_ih_l0.grad = model.weight_ih_l0.grad, None
        return padded.detach(), n_steps, gradient

    expected = program()
    with lazy_mode():
        found = materialize(program())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("record", ["always", "auto"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_backward_through_a_packed_sequence(record, wrapped, monkeypatch):
    monkeypatch.setattr(policy, "FIRST_CALLS", 0)
    model = torch.nn.Linear(3, 4)
    batches = [torch.randn(5, 2, 3) for _ in range(6)]

    def program(x):
        packed = rnn.pack_padded_sequence(model(x), torch.tensor([4, 2]))
        padded, _ = rnn.pad_packed_sequence(packed)
        return torch.autograd.grad(padded.square().sum(), model.weight)[0]

    expected = [program(x) for x in batches]
    if wrapped:
        wrap(model)
    configure(record=record)
    for x, gradient in zip(batches, expected, strict=True):
        with nullcontext() if wrapped else lazy_mode():
            found = program(x)
        assert torch.equal(materialize(found), gradient)


def test_split_at_lazy_indices():
    x = torch.arange(12.0)
    with lazy_mode():
        at = torch.tensor([1, 2]) + 1
        parts = torch.tensor_split(x + 1, at)
        same_parts = (x + 1).tensor_split(tensor_indices_or_sections=at)
    for found in (parts, same_parts):
        for one, other in zip(found, torch.tensor_split(x + 1, (2, 3)), strict=True):
            assert torch.equal(materialize(one), other)
