"""One kernel for all sizes of a structure: what counts as one, and that it computes as eager."""

import pickle

import pytest
import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.backends.artifact import Steps
from lazy_tensor.kernels.backends.aten import AtenBackend, compile_aten
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.generic import Generic, generic_of, strides_like, structure_of
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, TensorSpec
from lazy_tensor.kernels.service import families
from lazy_tensor.kernels.service.compile import Compiler

aten = torch.ops.aten


def spec(*size, order=None):
    tensor = torch.empty_permuted(size, order or tuple(range(len(size))))
    return TensorSpec(tuple(size), tensor.stride(), torch.float32, torch.device("cpu"))


def norm(batch, n, width):
    """Layer norm, GELU, times a number, and the sum over all rows."""
    x, per_row, w = spec(batch, n, width), spec(batch, n, 1), spec(width)
    return Segment(
        (x, w, w),
        (float,),
        (
            Call(aten.native_layer_norm.default, (Ref(0), (width,), Ref(1), Ref(2), 1e-5), (),
                 (x, per_row, per_row)),
            Call(aten.gelu.default, (Ref(3),), (), (x,)),
            Call(aten.mul.Tensor, (Ref(6), ScalarRef(0)), (), (x,)),
            Call(aten.view.default, (Ref(7), (batch * n, width)), (), (spec(batch * n, width),)),
            Call(aten.sum.dim_IntList, (Ref(8), (0,)), (), (w,)),
        ),
        (4, 7, 9),
    )  # fmt: skip


def update(*size, order=None):
    """`p += 0.5 * g.tanh()` in place."""
    s = spec(*size, order=order)
    return Segment(
        (s, s),
        (),
        (
            Call(aten.tanh.default, (Ref(1),), (), (s,)),
            Call(aten.add_.Tensor, (Ref(0), Ref(2)), (("alpha", 0.5),), ()),
        ),
        (),
    )


def structure(segment):
    found = structure_of(segment)
    assert found is not None
    return found


def generic(*segments):
    return generic_of([*map(structure, segments)], segments[-1])


def test_sizes_are_no_part_of_a_structure():
    one, other = structure(norm(4, 6, 64)), structure(norm(2, 9, 32))
    assert one.text == other.text
    assert one.of_inputs == (4, 6, 64, 64, 64)
    assert one.of_calls == (64, 24, 64)


@pytest.mark.parametrize(
    "other", [update(4, 1), update(4, 5, 6), update(4, 5, order=(1, 0)), norm(4, 5, 6)]
)
def test_ranks_single_elements_and_layouts_are_part_of_a_structure(other):
    assert structure(update(4, 5)).text != structure(other).text


def test_sizes_that_are_no_symbols_stay_as_they_are():
    """A huge one, and 1, which broadcasts."""
    huge = 1 << 31
    segments = [
        Segment(
            (TensorSpec((huge, n, 1), (n, 1, 1), torch.uint8, torch.device("cpu")),),
            (),
            (Call(aten.neg.default, (Ref(0),), (), (spec(2),)),),
            (0,),
        )
        for n in (2, 3)
    ]
    found = generic(*segments)
    assert found is not None
    specs, _ = found.with_symbols([5])
    assert [one.size for one in specs] == [(huge, 5, 1)]


def test_strides_with_gaps_have_no_structure():
    s = TensorSpec((4, 5), (10, 1), torch.float32, torch.device("cpu"))
    call = Call(aten.neg.default, (Ref(0),), (), (spec(4, 5),))
    assert structure_of(Segment((s,), (), (call,), (1,))) is None


@pytest.mark.parametrize(
    ("size", "stride"),
    [((1, 2, 3, 4), (1, 1, 2, 6)), ((1, 2, 3, 4), (24, 12, 4, 1)), ((3, 1), (1, 1)),
     ((1, 1), (1, 1)), ((2, 1, 3), (1, 6, 2))],
)  # fmt: skip
def test_dimensions_of_one_element_keep_their_strides(size, stride):
    s = TensorSpec(size, stride, torch.float32, torch.device("cpu"))
    assert strides_like(s, size) == stride


def test_the_sizes_of_a_third_follow_from_those_of_two():
    found = generic(norm(3, 6, 32), norm(4, 9, 64))
    assert found.values_of(structure(norm(2, 17, 16))) == (2, 17, 16)
    assert found.own_values == (4, 9, 64)
    assert pickle.loads(pickle.dumps(found)) == found


def test_sizes_that_two_have_in_common_stay_constants():
    found = generic(norm(4, 6, 64), norm(4, 9, 64))
    assert found.own_values == (9,)
    assert found.values_of(structure(norm(4, 17, 64))) == (17,)
    assert found.values_of(structure(norm(4, 17, 32))) is None
    third = generic(norm(4, 6, 64), norm(4, 9, 64), norm(4, 17, 32))
    assert third.values_of(structure(norm(5, 3, 16))) == (5, 3, 16)


def rows(batch, n, width):
    """`x.view(batch, n, width).neg()`, of the rows of a batch."""
    x = spec(batch, n, width)
    view = Call(aten.view.default, (Ref(0), (batch, n, width)), (), (x,))
    neg = Call(aten.neg.default, (Ref(1),), (), (x,))
    return Segment((spec(batch * n, width),), (), (view, neg), (2,))


def test_sizes_of_inputs_follow_from_those_of_views():
    found = generic(rows(4, 14, 16), rows(4, 17, 16))
    assert found.own_values == (17,)
    assert found.values_of(structure(rows(4, 20, 16))) == (20,)
    assert found.values_of(structure(rows(5, 20, 16))) is None
    third = generic(rows(4, 14, 16), rows(4, 17, 16), rows(5, 6, 8))
    assert sorted(third.own_values) == [5, 6, 8]
    assert sorted(third.values_of(structure(rows(3, 7, 10))) or ()) == [3, 7, 10]


def test_sizes_that_do_not_follow_do_not_fit():
    found = generic(norm(4, 6, 64), norm(4, 9, 64))
    other = norm(2, 17, 32)
    shrunk = Segment((other.inputs[0], spec(16), spec(16)), other.scalars, other.calls, (4, 7, 9))
    assert found.values_of(structure(shrunk)) is None


def test_the_name_on_disk_does_not_depend_on_which_sizes_came_first():
    assert (
        generic(norm(4, 6, 64), norm(3, 9, 16)).digest
        == generic(norm(2, 5, 32), norm(5, 7, 48)).digest
    )


@pytest.fixture(scope="module")
def built():
    return InductorBackend().build(generic(norm(3, 6, 32), norm(4, 9, 64)))


@pytest.mark.parametrize("sizes", [(4, 6, 64), (4, 9, 64), (2, 17, 32), (3, 3, 3), (7, 40, 5)])
def test_inductors_kernel_fits_all_sizes_that_it_says(sizes, built):
    backend = InductorBackend()
    if not backend.fits(built, sizes):
        pytest.skip("it says that it doesn't")
    segment = norm(*sizes)
    loaded = backend.load(segment, built)
    assert isinstance(loaded, Steps)
    kernel = loaded.for_sizes(sizes, is_long=False)
    inputs = [torch.randn(s.size) for s in segment.inputs]
    expected = compile_aten(segment)(inputs, (0.7,))
    for mine, theirs in zip(kernel(inputs, (0.7,)), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert mine.stride() == theirs.stride()


def test_inductors_kernel_says_which_sizes_it_fits(built):
    backend = InductorBackend()
    assert backend.fits(built, (4, 9, 64))
    assert backend.fits(built, (2, 17, 32))
    assert not backend.fits(built, (4000, 4000, 64))  # its sum is split in parts for few rows


class Counting(AtenBackend):
    """Builds are counted and empty; kernels run op by op whatever the sizes."""

    name = "counting"

    def __init__(self):
        self.built = []

    def can_build(self, segment):
        return True

    def fingerprint(self):
        return "1"

    def build(self, segment):
        self.built.append(segment)
        return b"artifact"

    def load(self, segment, artifact):
        return compile_aten(segment)

    def fits(self, artifact, values):
        return max(values) < 100


@pytest.fixture
def compiler():
    compiler = Compiler()
    yield compiler
    compiler.close()


def compile_all(compiler, backend, segments):
    return [compiler.fusion_of(segment, backend, mode="blocking").status for segment in segments]


def test_a_structure_is_compiled_a_few_times_whatever_the_sizes(compiler):
    backend = Counting()
    segments = [update(n, m) for n in range(2, 8) for m in range(2, 8)]
    segments += [norm(4, n, 64) for n in range(2, 22)]
    assert set(compile_all(compiler, backend, segments)) == {"ready"}
    # of the first structure one size changes first, then both
    is_generic = [isinstance(s, Generic) for s in backend.built]
    assert is_generic == [False, True, True, False, True]
    assert compiler.counters.snapshot()["compiled"] == 5


def test_sizes_that_the_kernel_is_not_right_for_run_op_by_op(compiler):
    statuses = compile_all(compiler, Counting(), [update(2, 3), update(2, 4), update(2, 500)])
    assert statuses == ["ready", "ready", "declined"]


def test_where_no_kernel_serves_all_sizes_each_has_its_own(compiler, monkeypatch):
    backend = Counting()
    build = backend.build

    def build_own(segment):
        if isinstance(segment, Generic):
            raise RuntimeError("it depends on sizes")
        return build(segment)

    monkeypatch.setattr(backend, "build", build_own)
    segments = [update(2, n) for n in range(3, 7)]
    assert set(compile_all(compiler, backend, segments)) == {"ready"}
    assert backend.built == segments


def test_the_second_time_all_kernels_come_from_disk(tmp_path):
    segments = [norm(4, n, 64) for n in (3, 5, 8)]
    for expected in ([3 - 1, 0], [0, 2]):
        backend, compiler = Counting(), Compiler(cache_dir=tmp_path)
        compile_all(compiler, backend, segments)
        counts = compiler.counters.snapshot()
        assert [counts["compiled"], counts["loaded"]] == expected
        compiler.close()


def test_sizes_that_relate_in_another_way_make_another_generic_kernel(compiler):
    backend = Counting()

    def added(n, m):
        """Two widths that may be equal."""
        one, other = spec(n, 1), spec(m, 1)
        shared = (
            Call(aten.neg.default, (Ref(0),), (), (one,)),
            Call(aten.neg.default, (Ref(1),), (), (other,)),
        )
        return Segment((one, other), (), shared, (2, 3))

    sizes = [(4, 4), (5, 5), (6, 6), (6, 7), (8, 9), (9, 9)]
    assert set(compile_all(compiler, backend, [added(*one) for one in sizes])) == {"ready"}
    assert [isinstance(s, Generic) and len(s.own_values) for s in backend.built] == [False, 1, 2]


def test_sizes_that_never_follow_get_no_kernel(compiler, monkeypatch):
    monkeypatch.setattr(families, "MOST_EXAMPLES", 2)
    backend = Counting()
    compile_all(compiler, backend, [norm(3, 6, 32), norm(4, 9, 64)])
    other = norm(2, 17, 32)
    odd = Segment((other.inputs[0], spec(16), spec(16)), other.scalars, other.calls, (4, 7, 9))
    with pytest.raises(Declined):
        compiler._families.member(odd, backend)
    assert compile_all(compiler, backend, [odd]) == ["declined"]
