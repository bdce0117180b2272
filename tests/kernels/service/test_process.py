"""Whole programs: a second process compiles nothing, exits are clean, forks go on."""

import shutil
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import os, pathlib, sys, torch
from lazy_tensor.kernels import Call, Ref, Segment, TensorSpec
from lazy_tensor.kernels.backend import choose
from lazy_tensor.kernels.service.compile import Compiler

aten = torch.ops.aten
spec = TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))
calls = (Call(aten.mul.Tensor, (Ref(0), Ref(0)), (), (spec,)),
         Call(aten.add.Tensor, (Ref(1), Ref(0)), (), (spec,)))
segment = Segment((spec,), (), calls, (2,))
# a sum of few elements needs a worker
total = Call(aten.sum.dim_IntList, (Ref(1), (0,)), (),
             (TensorSpec((), (), torch.float32, torch.device("cpu")),))
for_worker = Segment((spec,), (), (calls[0], total), (2,))
x = torch.full((4,), 3.0)
compiler = Compiler(cache_dir=pathlib.Path(sys.argv[1]))
backend = choose("auto", "cpu")
"""


def program(body, cache_dir):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(body), str(cache_dir)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.split()


BLOCKING = """
fusion = compiler.fusion_of(segment, backend, mode="blocking")
assert fusion.run([x], [])[0].tolist() == [12.0] * 4
heavy = ("compile_fx", "lowering", "codecache", "async_compile")
inductor = [name for name in heavy if f"torch._inductor.{name}" in sys.modules]
print(compiler.counters.compiled, compiler.counters.loaded, len(inductor))
"""


def test_kernels_are_kept_in_a_folder_with_a_space_in_its_name(tmp_path):
    folder = tmp_path / "my kernels"
    assert program(BLOCKING, folder) == ["1", "0", "0"]
    assert program(BLOCKING, folder) == ["0", "1", "0"]


def test_second_process_loads_and_neither_imports_inductor(cache_dir, tmp_path):
    # what builds share (the instruction set's tests) is taken from the session's directory
    (cache_dir / "build").mkdir(exist_ok=True)
    shutil.copytree(cache_dir / "build", tmp_path / "build")
    assert program(BLOCKING, tmp_path) == ["1", "0", "0"]
    assert program(BLOCKING, tmp_path) == ["0", "1", "0"]


@pytest.mark.parametrize("segment", ["segment", "for_worker"])
@pytest.mark.parametrize("until", ["True", "compiler._workers._all or running"])
def test_exit_does_not_wait_for_a_compile(tmp_path, held_compiler, segment, until):
    body = f"""
    from lazy_tensor.kernels.extension import program
    from lazy_tensor.kernels.loops.cpp import _running as running
    assert program.ask_for(None, may_compile=True, wait=True)
    os.environ["CXX"] = {str(held_compiler.path)!r}
    fusion = compiler.fusion_of({segment}, backend, mode="background", threshold=1)
    fusion.run([x], [])
    assert compiler._to_load.wait(60)
    fusion.run([x], [])
    while not ({until}):
        pass
    print(fusion.status)
    """
    shown = program(body, tmp_path)
    assert shown[0] in ("queued", "compiling")


def test_forked_child_runs_op_by_op_and_leaves_the_parents_worker_alone(cache_dir):
    body = """
    fusion = compiler.fusion_of(segment, backend, mode="blocking")
    compiler._workers.build(backend, segment)
    pid = os.fork()
    if pid == 0:
        ok = fusion.status == "aten" and fusion.run([x], [])[0].tolist() == [12.0] * 4
        other = Segment((spec,), (), calls[:1], (1,))
        new = compiler.fusion_of(other, backend, mode="blocking")
        os._exit(0 if ok and new.run([x], [])[0].tolist() == [9.0] * 4 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert fusion.status == "ready"
    compiler._workers.build(backend, segment)
    print("parent builds")
    """
    assert program(body, cache_dir) == ["parent", "builds"]
