"""Kernels as bytes: what goes in comes out, in this process without a trace on disk."""

import os

import torch

from lazy_tensor.kernels import library
from lazy_tensor.kernels.backends.artifact import kernel_of, packed, unpacked
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.backends.torch_inductor import Compiled


def test_artifact_without_kernels_round_trips():
    view = ["view", "result 0", "x", [2], [2], 1]
    steps = {"arguments": ["x"], "steps": [view], "results": ["result 0"]}
    content = packed(Compiled(steps, (), ((2,),), (), ()), b"", has_check=False)
    assert unpacked(content, ())([torch.arange(4)], [])[0].tolist() == [1, 3]


def test_scalars_arrive_exactly_as_0_dim_tensors():
    kernel = kernel_of(lambda args: tuple(t.clone() for t in args), (float, int))
    for values in ([0.1, 2**62], [-1e300, -1]):
        with torch.device("meta"):  # Inductor reads them on the CPU
            outputs = kernel([], values)
        assert [t.item() for t in outputs] == values
        assert [t.dtype for t in outputs] == [torch.float64, torch.int64]


def test_loading_leaves_no_file_behind(record, compiler, tmp_path, monkeypatch):
    segment = record(lambda a: a.exp() + 1, [torch.ones(3)]).segment
    fusion = compiler.fusion_of(segment, InductorBackend(), mode="blocking")
    content = compiler.disk.get(compiler._artifact_key(fusion))
    monkeypatch.setattr(library, "own_folder", lambda: str(tmp_path))
    kernels = [unpacked(content, ()) for _ in range(3)]
    assert os.listdir(tmp_path) == []
    assert all(torch.equal(k([torch.zeros(3)], [])[0], torch.full((3,), 2.0)) for k in kernels)
