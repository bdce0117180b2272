"""Draws of random numbers whose sizes follow from those of the tensors that a call reads.

In: a `Draw`, and what its sizes were in some calls. Out: `SizedDraw`, which draws for the sizes of
the replay that runs. Made by `any_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lazy_tensor.dispatch.run.tape import Draw
from lazy_tensor.dispatch.traced_number import computes


def sizes_of(draw: Draw) -> tuple[int, ...]:
    """The ints that a draw depends on, in order: its sizes, and bounds of its numbers."""
    return tuple(_ints(_parts(draw)))


def kind_of(draw: Draw) -> Any:
    """What is left of a draw's key without these ints."""
    kind = _mapped(_parts(draw), lambda _: ...)
    return (draw.op, repr(kind), draw.key[3:])


def _parts(draw: Draw) -> tuple[Any, ...]:
    # the draw's key has the generator's id
    given = [_without_generator(one) for one in (*draw.args, *draw.kwargs.values())]
    return (draw.like, tuple(draw.kwargs), given)


def _without_generator(value: Any) -> Any:
    return None if hasattr(value, "get_state") else value


def _ints(value: Any) -> Iterator[int]:
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _ints(one)
    elif type(value) is int:
        yield value


def _mapped(value: Any, change: Callable[[int], Any]) -> Any:
    """A value with others in place of its ints, in tuples and lists too."""
    if isinstance(value, (tuple, list)):
        return tuple([_mapped(one, change) for one in value])
    return change(value) if type(value) is int else value


class SizedDraw(Draw):
    """A draw whose ints are computed by `texts`, in the order of `sizes_of`, from `symbols()`."""

    def __init__(self, draw: Draw, texts: list[str], symbols: Callable[[], dict[Any, int]]) -> None:
        self.op, self.zeroed, self.item = draw.op, draw.zeroed, draw.item
        self.like, self.args, self.kwargs = draw.like, draw.args, draw.kwargs
        self._compute = computes(f"({''.join(f'{text}, ' for text in texts)})")
        self._symbols = symbols

    def __call__(self) -> Any:
        """Draw."""
        numbers: Iterator[int] = iter(self._compute(self._symbols()))
        changed = object.__new__(Draw)
        changed.op, changed.zeroed, changed.item = self.op, self.zeroed, self.item
        changed.like = _mapped(self.like, lambda _: next(numbers))
        changed.args = tuple([_mapped(one, lambda _: next(numbers)) for one in self.args])
        changed.kwargs = {
            name: _mapped(one, lambda _: next(numbers)) for name, one in self.kwargs.items()
        }
        return changed()
