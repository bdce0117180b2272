"""Views that plans make without calling their ops, against eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazy_tensor import lazy_mode, materialize
from lazy_tensor.kernels.extension import program

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda x: x[0].t(),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:, :1].squeeze(),
    "squeeze one": lambda x: x[:, :1].squeeze(1),
    "squeeze several": lambda x: x[:, :1].squeeze((0, 1)),
    "view": lambda x: x.view(2, -1),
    "select": lambda x: x.select(2, 3),
    "select from the end": lambda x: x[-1].select(0, -2),
    "of one element": lambda x: x[:, :1].select(1, 0).select(1, 2),
    "of views": lambda x: x.transpose(0, 1)[2].t().unsqueeze(0),
    "of a part": lambda x: x[1:].transpose(1, 2).select(0, 0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_lies_where_eagers_does(name: str) -> None:
    make = VIEWS[name]
    expected = torch.zeros(2, 3, 4)
    x = expected.clone()
    for i in range(4):
        right = make(expected + 1)
        with lazy_mode():
            base = x + 1
            view = make(base)
            part = make(x)
            if name != "expand":  # whose elements are several at one place
                part.add_(1)
        whole = make(expected)
        if name != "expand":
            whole.add_(1)
        for mine, theirs in ((view, right), (part, whole)):
            found = materialize(mine)
            assert torch.equal(found, theirs), i
            assert mine.stride() == theirs.stride()
            assert mine.storage_offset() == theirs.storage_offset()
        assert torch.equal(x, expected), i


def test_they_need_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    own = program.view

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return own(*args, **kwargs)

    monkeypatch.setattr(program, "view", counted)
    x = torch.rand(4, 6)
    for _ in range(3):
        with lazy_mode():
            y = x.unsqueeze(0)[0].t() @ x
    assert torch.equal(materialize(y), x.t() @ x)
    assert len(made) == 3
