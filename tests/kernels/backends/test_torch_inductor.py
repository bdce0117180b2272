"""The adapter around torch's private parts, without compiling anything."""

import pytest

from lazy_tensor.kernels.backends.torch_inductor import NotPortable, private, steps_of

WRAPPER = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import maybe_profile
from torch import device
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''int x;''')
cpp_fused_1 = async_compile.cpp_pybinding(['float*'], r'''int y;''')
async_compile.wait(globals())
del async_compile
class Runner:
    def call(self, args):
        x, = args
        args.clear()
        {body}
        return (x,)
call = Runner().call
def get_args():
    from torch._dynamo.testing import rand_strided
def benchmark_compiled_module(args):
    pass
if __name__ == "__main__":
    compiled_module_main('None', benchmark_compiled_module)
"""


def test_wrapper_keeps_its_program_and_loses_inductor():
    steps, kernels = steps_of(WRAPPER.format(body="cpp_fused_1(x)"))
    assert kernels == ["cpp_fused_0", "cpp_fused_1"]
    assert steps == {"arguments": ["x"], "steps": [["kernel", 1, ["x"], []]], "results": ["x"]}


def test_wrapper_that_calls_into_inductor_is_not_portable():
    with pytest.raises(NotPortable, match="maybe_profile"):
        steps_of(WRAPPER.format(body="maybe_profile(x)"))


def test_missing_private_name_says_which_and_what_to_do():
    with pytest.raises(RuntimeError, match=r"no torch._inductor.nothing.at_all .*backend='aten'"):
        private("torch._inductor.nothing", "at_all")
    with pytest.raises(RuntimeError, match=r"no torch._C.no_such_name"):
        private("torch._C", "no_such_name")


KERNEL = "cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''int x;''')\n"
TAKEN_APART = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        arg0_1_size = arg0_1.size()
        s40 = arg0_1_size[0]
        buf0 = empty_strided_cpu((s40, 8), (8, 1), torch.float32)
        buf1 = buf0
        del buf0
        buf2 = reinterpret_tensor(buf1, (8, s40), (1, 8), 0)
        cpp_fused_0(buf1, arg0_1, arg1_1, 8*s40)
        del arg0_1
        return (buf1, reinterpret_tensor(buf2, (8, ), (1, ), 3), )
"""


def test_a_wrapper_is_taken_apart() -> None:
    steps, _ = steps_of(KERNEL + TAKEN_APART, ["s40"])
    assert steps == {
        "arguments": ["arg0_1", "arg1_1"],
        "steps": [
            ["allocate", "buf0", ["s40", 8], [8, 1], "float32"],
            ["view", "buf2", "buf0", [8, "s40"], [1, 8], 0],
            ["kernel", 0, ["buf0", "arg0_1", "arg1_1", ["8 * s40"]], ["arg0_1"]],
            ["view", "result 1", "buf2", [8], [1], 3],
        ],
        "results": ["buf0", "result 1"],
    }


REUSED = """
class Runner:
    def call(self, args):
        arg0_1, = args
        args.clear()
        buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)
        cpp_fused_0(arg0_1, buf0)
        buf1 = buf0
        del buf0
        cpp_fused_0(arg0_1, buf1)
        buf2 = empty_strided_cpu((8, ), (1, ), torch.float32)
        cpp_fused_0(buf1, buf2)
        del buf1
        return (buf2, )
"""


def test_a_buffer_that_is_used_again_is_freed_under_its_last_name() -> None:
    steps, _ = steps_of(KERNEL + REUSED)
    assert [step[-1] for step in steps["steps"] if step[0] == "kernel"] == [[], [], ["buf0"]]


LIBRARY_CALLS = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        view = reinterpret_tensor(arg1_1, (4, 2), (1, 4), 0)
        extern_kernels.addmm(arg0_1, reinterpret_tensor(view, (4, 2), (1, 4), 0), arg1_1,
                             alpha=1, beta=0.5, out=buf0)
        buf1 = torch.ops.aten.max_pool2d_with_indices.default(buf0, [2, 2], [1, 1])
        buf2 = buf1[0]
        assert_size_stride(buf2, (3, 3), (3, 1), 'torch.ops.aten.max_pool2d_with_indices.default')
        buf3 = buf1[1]
        assert_size_stride(buf3, (3, 3), (3, 1), 'torch.ops.aten.max_pool2d_with_indices.default')
        del buf1
        del buf0
        buf4 = torch.ops.aten.cumsum.default(buf2, -1, dtype=torch.float64)
        assert_size_stride(buf4, (3, 3), (3, 1), 'torch.ops.aten.cumsum.default')
        return (buf4, buf3, )
"""


def test_library_calls_are_steps_with_the_strides_of_what_they_give() -> None:
    steps, _ = steps_of(LIBRARY_CALLS)
    assert steps["steps"] == [
        ["allocate", "buf0", [4, 4], [4, 1], "float32"],
        ["view", "view", "arg1_1", [4, 2], [1, 4], 0],
        ["view", "view 2", "view", [4, 2], [1, 4], 0],
        [
            "call", "aten.addmm.out",
            [{"tensor": "arg0_1"}, {"tensor": "view 2"}, {"tensor": "arg1_1"}],
            {"alpha": 1, "beta": 0.5, "out": {"tensor": "buf0"}}, [], [], ["view 2"],
        ],
        [
            "call", "aten.max_pool2d_with_indices.default",
            [{"tensor": "buf0"}, [2, 2], [1, 1]], {},
            ["buf2", "buf3"], [[3, 1], [3, 1]], ["buf1", "buf0"],
        ],
        [
            "call", "aten.cumsum.default", [{"tensor": "buf2"}, -1],
            {"dtype": {"torch": "float64"}}, ["buf4"], [[3, 1]], [],
        ],
    ]  # fmt: skip
    assert steps["results"] == ["buf4", "buf3"]


def test_the_strides_of_a_library_call_may_be_said_of_its_results_other_name() -> None:
    line = "assert_size_stride(buf4, "
    other = LIBRARY_CALLS.replace(line, "buf5 = buf4\n        assert_size_stride(buf5, ")
    steps, _ = steps_of(other)
    assert steps == steps_of(LIBRARY_CALLS)[0]


def test_library_calls_that_do_not_say_their_strides_are_no_steps() -> None:
    lines = [one for one in LIBRARY_CALLS.splitlines() if "assert_size_stride(buf3" not in one]
    with pytest.raises(NotPortable):
        steps_of("\n".join(lines))


@pytest.mark.parametrize(
    "line",
    [
        "buf3 = torch.ops.aten.unbind.int(buf1)",
        "buf3 = empty_strided_cpu((u0, ), (1, ), torch.float32)",
        "cpp_fused_1(buf1)",
        "cpp_fused_0(" + "buf1, " * 1025 + ")",
        "if s40: pass",
    ],
)
def test_a_wrapper_that_does_something_else_is_not(line: str) -> None:
    source = TAKEN_APART.replace("        return", f"        {line}\n        return")
    with pytest.raises(NotPortable):
        steps_of(KERNEL + source, ["s40"])
