import gc
import logging
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazy_tensor import (
    cache_clear,
    configure,
    explain,
    flush as flush_now,
    is_pending,
    lazy_mode,
    materialize,
    stats,
    unwrap,
    wrap,
)
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.metadata.infer import Outcome
from lazy_tensor.dispatch.metadata.shape_formulas import closed_form
from lazy_tensor.dispatch.ops import rules
from lazy_tensor.dispatch.plan.interpret import OWN_STRIDES, has_strides
from lazy_tensor.dispatch.plan.plan import Plan
from lazy_tensor.dispatch.record import extend_trie
from lazy_tensor.dispatch.run import compile_service, flush as run_flush, plan_cache
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.tensor_types import value_in
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.kernels.service.compile import Compiler


def test_causes_are_counted():
    x = torch.ones(3)
    with lazy_mode():
        (x + 1).sum().item()
        (x + 1).nonzero()
        (x + 2).numpy()
        x * 2
    causes = stats()["flush_causes"]
    assert causes[".item()"] == 1
    assert causes["nonzero()"] == 1
    assert causes[".numpy()"] == 1
    assert causes["exit"] == 1


def test_explain_names_line_and_cause():
    x = wrap(torch.ones(3))
    (x + 1).sum().item()
    record = explain().records[-1]
    assert "test_flush.py:" in record.where
    assert record.cause == ".item()"
    assert record.n_ops == 2


def test_explain_foretells_the_peak_of_a_plan():
    x = torch.rand(256, 1024)  # a MiB

    def three_at_a_time():
        with lazy_mode():
            a = x + 1
            b = a * 2
            return a @ b.t(), a + b  # 0.25 MiB; then a dies where b does

    for _ in range(3):
        three_at_a_time()
    report = explain()
    assert report.flushes[-1].peak_bytes == 3.25 * 2**20
    assert "peak 3.2 MiB" in str(report)


def test_explain_shows_a_flush_that_raised():
    with lazy_mode():
        bad = torch.ones(3)[torch.tensor([5])]
        n_flushes = stats()["flushes"]
        with pytest.raises(IndexError):
            print(bad)
    assert stats()["flushes"] == n_flushes + 1
    record = explain().records[-1]
    assert (record.raised, record.n_ops > 0) == ("IndexError", True)
    assert "raised IndexError" in str(explain())


def test_flushes_that_raise_have_times_of_their_own():
    x, places = torch.randn(3), {i: torch.tensor([i]) for i in (0, 1, 2, 5, 6, 7)}
    with lazy_mode(record="always"):
        for i, place in places.items():
            y = x[place]
            with nullcontext() if i < 3 else pytest.raises(IndexError):
                y.data_ptr()  # no sync point
        gaps_s = [record.gap_s for record in explain().records if record.raised]
    assert len(set(gaps_s)) == 3


def test_an_interrupt_behind_a_plan_that_raised_loses_nothing(monkeypatch):
    x, seen = torch.arange(3.0), {}

    def step(i):
        place = torch.tensor([i])
        with lazy_mode(record="always"):
            seen["other"], seen["part"] = x + 1, x[place] + 1

    def interrupt():
        monkeypatch.undo()
        raise KeyboardInterrupt

    for i in (0, 1, 2):
        step(i)
    monkeypatch.setattr(run_flush, "user_line", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(9)
    assert seen["other"].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(IndexError, match="index 9"):
        seen["part"].tolist()


def test_dead_values_are_not_computed():
    x = torch.randn(8, 8)

    def program():
        with lazy_mode():
            x @ x
            return x + 1

    program()
    program()
    plan = flush_plans()[-1]
    assert [step.nodes[0].facts.op for step in plan.steps] == [torch.ops.aten.add.Tensor]


def flush_plans():
    found: list[Plan] = []

    def visit(state):
        found.extend((state.plans or {}).values())
        for child in (*state.values(), *(state.generic or {}).values()):
            visit(child)

    for root in local.trace.roots.values():
        visit(root)
    return found


def test_repeated_expressions_run_once():
    x = torch.randn(8, 8)

    def program():
        with lazy_mode():
            return (x @ x).exp() + (x @ x).tanh()

    expected = (x @ x).exp() + (x @ x).tanh()
    for _ in range(3):
        assert torch.equal(materialize(program()), expected)
    ops = [step.nodes[0].facts.op for step in flush_plans()[-1].steps]
    assert ops.count(torch.ops.aten.mm.default) == 1


@pytest.mark.parametrize(
    ("change", "n_copies"),
    [
        (lambda x, copy: copy.exp(), 0),
        (lambda x, copy: copy.view(-1).exp(), 0),
        (lambda x, copy: copy.add_(1), 1),
        (lambda x, copy: copy, 1),
        (lambda x, copy: copy[0], 1),
        (lambda x, copy: x.zero_() + copy, 1),
        (lambda x, copy: x[0].zero_() + copy, 1),
    ],
)
def test_copies_that_nobody_can_tell_apart_are_left_out(change, n_copies):
    plain = torch.randn(8, 8)

    def program(x):
        x = x @ x
        return x, change(x, x.clone())

    expected = program(plain)
    for _ in range(3):
        with lazy_mode():
            found = program(plain)
        torch.testing.assert_close(materialize(found), expected, rtol=0, atol=0)
    ops = [node.facts.op for step in flush_plans()[-1].steps for node in step.nodes]
    assert ops.count(torch.ops.aten.clone.default) == n_copies


def test_recomputation_is_not_merged_with_what_it_recomputes():
    x = torch.randn(8, 8)

    def program():
        with lazy_mode():
            a = x.exp()
            b = a.sum()
            del a
            c = x.cos() + b
            for _ in range(20):
                c = c + 1
            return c + x.exp()

    for _ in range(3):
        program()
    ops = [step.nodes[0].facts.op for step in flush_plans()[-1].steps]
    assert ops.count(torch.ops.aten.exp.default) == 2


def test_failing_op_names_its_line_and_spares_what_came_before():
    table = torch.randn(4, 2)
    for _ in range(3):
        with lazy_mode():
            before = table + 1
            bad = table[torch.tensor([1, 9])]
            after = bad * 2
            with pytest.raises(IndexError) as raised:
                after.sum().item()
        assert any("test_flush.py" in note for note in raised.value.__notes__)
        assert torch.equal(materialize(before), table + 1)
        with pytest.raises(IndexError):
            after.tolist()


class _Ops(TorchDispatchMode):
    def __init__(self):
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.recorded
def test_an_item_that_another_mode_sees_is_read_by_an_op():
    x = torch.ones(3)
    for _ in range(3):
        with lazy_mode():
            y = x.sum()
            with _Ops() as mode:
                assert y.item() == 3.0
        assert torch.ops.aten._local_scalar_dense.default in mode.seen


@pytest.mark.recorded
def test_a_known_plan_runs_in_inference_mode_and_gives_ordinary_tensors():
    x = wrap(torch.ones(3))
    for _ in range(4):
        y = x * 2
        with torch.inference_mode():
            assert y.sum().item() == 6.0
        assert not materialize(y).is_inference()


@pytest.mark.recorded
def test_a_finalizer_that_records_while_a_known_plan_is_taken_on_loses_nothing():
    x = torch.ones(3)
    found: list[torch.Tensor] = []

    class Late:
        def __init__(self):
            self.itself = self  # garbage, which a collection finds

        def __del__(self):
            found.append(x + len(found))

    for n in range(6):
        with lazy_mode():
            y = x * n
            Late()
            z = y + 1
            flush_now()
            gc.collect()
            assert torch.equal(z, x * n + 1)
    assert all(torch.equal(one, x + i) for i, one in enumerate(found))


def test_live_set_is_what_is_held():
    x = wrap(torch.ones(4))
    kept = x + 1
    dropped = kept * 2
    final = dropped + 3
    del dropped
    gc.collect()
    assert final.tolist() == [7.0] * 4
    assert not is_pending(kept)
    assert value_in(kept).data is not None


def test_at_once_policy_hands_over_at_each_non_fusible_op():
    x = torch.randn(4, 4)
    for n_passes in (1, 2, 3):
        with lazy_mode(flush_policy="at_once", backend="inductor", compile="off"):
            y = x + 1
            assert is_pending(y)
            z = y @ y
            assert not is_pending(z)
            w = z + 1
            assert is_pending(w)
        assert stats()["flush_causes"]["segment closed"] == n_passes


def test_what_closes_a_segment_follows_the_settings():
    x = torch.randn(4, 4)

    def program():
        before = stats()["flush_causes"].get("segment closed", 0)
        with lazy_mode(compile="off", flush_policy="at_once"):
            materialize((x + 1) * 2)
        return stats()["flush_causes"].get("segment closed", 0) - before

    configure(backend="aten")
    assert program() == 2
    configure(backend="inductor")
    assert program() == 0


def test_wrong_meta_function_costs_laziness_only(monkeypatch):
    def wrong(facts, args, kwargs, metas):
        assert facts.op is torch.ops.aten.digamma.default or facts.op is torch.ops.aten.sum.default
        size = (1,) if facts.op is torch.ops.aten.digamma.default else ()
        return Outcome(outs=((size, (1,) * len(size), 0, torch.float32, torch.device("cpu")),))

    monkeypatch.setattr(extend_trie, "closed_form", wrong)
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))
    x = torch.rand(2, 3)
    with lazy_mode():
        total = x.digamma().sum()
    assert torch.equal(materialize(total), x.digamma().sum())
    with lazy_mode():
        rows = x.digamma()
        assert rows.shape == (2, 3)
        assert not is_pending(rows)
    rules.rule_of.cache_clear()


def test_ops_on_what_a_wrong_meta_function_misjudged_are_not_blamed(monkeypatch):
    def wrong(facts, args, kwargs, metas):
        return Outcome(outs=(((1,), (1,), 0, torch.float32, torch.device("cpu")),))

    monkeypatch.setattr(extend_trie, "closed_form", wrong)
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))
    with lazy_mode():
        y = torch.rand(3).digamma().neg().exp()
    assert materialize(y).shape == (3,)
    aten = torch.ops.aten
    assert rules.rule_of(aten.digamma.default) is rules.Rule.EAGER
    assert rules.rule_of(aten.neg.default) is rules.Rule.RECORD
    assert rules.rule_of(aten.exp.default) is rules.Rule.RECORD
    rules.rule_of.cache_clear()


def test_a_dropped_plan_leaves_nothing_behind():
    x = torch.randn(3)
    for _ in range(3):
        with lazy_mode():
            (x + 1).exp()
    plans = [weakref.ref(plan) for plan in flush_plans()]
    assert len(plans) == 1
    cache_clear()
    gc.collect()
    assert plans[0]() is None


def test_broken_planner_costs_a_warning_only(monkeypatch):
    x = torch.randn(3)

    def broken(*_):
        raise AssertionError("planner bug")

    monkeypatch.setattr(plan_cache, "build_plan", broken)
    with lazy_mode():
        (x + 1).exp()
    with pytest.warns(UserWarning, match="can't be planned"), lazy_mode():
        y = (x + 1).exp()
    assert torch.equal(materialize(y), (x + 1).exp())


def test_what_happens_is_logged(caplog):
    x = torch.rand(3)
    with caplog.at_level(logging.INFO, logger="lazy_tensor"):
        for n in (3, 3, 2):
            with lazy_mode(backend="inductor", compile="blocking"):
                materialize(x[:n].exp() * 2)
    told = [(record.name, record.getMessage()) for record in caplog.records]
    assert sum(name == "lazy_tensor.flushes" for name, _ in told) == 3
    assert any("exp.default" in said for name, said in told if name == "lazy_tensor.compiles")
    assert [said for name, said in told if name == "lazy_tensor.misses"][-1].endswith("3 -> 2")


def recorded_as(monkeypatch, op, **changed):
    """Have `op` recorded as if it gave tensors of other metadata than it does."""

    def other(facts, *call):
        outcome = closed_form(facts, *call)
        if facts.op is not op:
            return outcome
        assert outcome is not None
        assert outcome.outs[0] is not None
        (size, stride, offset, dtype, device) = outcome.outs[0]
        meta = {"size": size, "stride": stride} | changed
        return Outcome(outs=((meta["size"], meta["stride"], offset, dtype, device),))

    monkeypatch.setattr(extend_trie, "closed_form", other)


def stride_of(computed: torch.Tensor) -> tuple[int, ...]:
    """The stride of the memory behind a lazy tensor."""
    data = value_in(computed).data
    assert data is not None
    return data.stride()


@pytest.mark.parametrize("options", [{}, {"compile": "blocking"}], ids=["interpreted", "planned"])
def test_results_are_laid_out_as_recorded_from_the_first_run_on(options, monkeypatch):
    sin = torch.ops.aten.sin.default
    OWN_STRIDES.discard(sin)
    recorded_as(monkeypatch, sin, stride=(1, 3))
    x = torch.rand(3, 4)
    configure(backend="aten", **options)
    for _ in range(3):
        with lazy_mode():
            y = x.sin()
        assert stride_of(y) == y.stride() == (1, 3)
        assert torch.equal(materialize(y), x.sin())


def test_explain_checks_what_it_runs(monkeypatch):
    recorded_as(monkeypatch, torch.ops.aten.sin.default, stride=(1, 3))
    x, made = torch.rand(3, 4), []
    explain(lambda: made.append(x.sin()))
    assert stride_of(made[0]) == made[0].stride()


@pytest.mark.parametrize("options", [{}, {"compile": "blocking"}], ids=["interpreted", "planned"])
def test_an_op_whose_shape_was_misjudged_runs_at_once_from_then_on(options, monkeypatch):
    recorded_as(monkeypatch, torch.ops.aten.sin.default, size=(4, 3), stride=(3, 1))
    x = torch.rand(3, 4)
    configure(backend="aten", **options)
    with lazy_mode():
        kept = x.sin()
    assert materialize(kept).shape == (3, 4)
    with lazy_mode():
        assert x.sin().shape == (3, 4)
    assert rules.rule_of(torch.ops.aten.sin.default) is rules.Rule.EAGER


def test_kernels_of_a_known_program_are_verified_once_that_is_asked_for():
    configure(backend="inductor", compile="blocking", compile_threshold=1)
    x = torch.rand(64, 64)

    def verified():
        with lazy_mode():
            y = x.sin().exp() + 1
        materialize(y)
        state = STATS.log[-1].state
        assert state is not None
        plans_by = settings.current().plans_by
        plans = [plan for (_, by), plan in (state.plans or {}).items() if by == plans_by]
        (fusion,) = [fusion for plan in plans for fusion in plan.fusions]
        return fusion._verify_every

    assert verified() == 0
    configure(verify_every=2)
    assert verified() == 2


def test_views_of_a_kernels_result_are_made_outside_of_it(monkeypatch):
    """`Segment` promises that no output is a view and that no two share memory."""
    configure(backend="inductor", compile="blocking", compile_threshold=1)
    segments = []
    fusion_of = Compiler.fusion_of

    def noted(self, segment, *args, **options):
        segments.append(segment)
        return fusion_of(self, segment, *args, **options)

    monkeypatch.setattr(Compiler, "fusion_of", noted)
    x = torch.rand(4, 6)
    with lazy_mode(record="always"):
        y = x * 2 + 1
        views = [y.t(), y[1:], y.view(-1), *y.split(3, 1)]
        z = views[0] * 2 - y.t().exp()
    assert [len(segment.outputs) for segment in segments] == [2]
    plain = unwrap(y)
    assert torch.equal(unwrap(views[-1]), plain[:, 3:])
    torch.testing.assert_close(unwrap(z), plain.t() * 2 - plain.t().exp())
    memories = {unwrap(one).untyped_storage().data_ptr() for one in (y, *views)}
    assert len(memories) == 1


def test_a_block_with_its_own_cache_dir_leaves_other_threads_compile_service_alone(tmp_path):
    own = compile_service.compiler()
    with lazy_mode(cache_dir=str(tmp_path)):
        assert compile_service.compiler() is not own
    assert compile_service.compiler() is own
    assert not own._is_closed


def test_strides_of_dims_of_one_element_are_no_reason_to_copy():
    assert has_strides(torch.rand(3, 1), (1, 3))
    assert not has_strides(torch.rand(3, 2), (1, 3))
