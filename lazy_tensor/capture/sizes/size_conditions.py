"""What sizes have to be for torch to make the same calls, though no Python has compared them.

In: the merged steps of calls of several sizes, and what tells a size by a text. Out: texts that
must be true. Called by `any_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lazy_tensor.capture.sizes.merged_steps import MergedSteps
from lazy_tensor.capture.sizes.size_texts import TOO_SMALL, Column
from lazy_tensor.capture.watched_object import Obstacle
from lazy_tensor.dispatch.traced_sizes import LEAST
from lazy_tensor.dispatch.trie.trace import Leaf
from lazy_tensor.kernels.generic import dense_strides
from lazy_tensor.kernels.segment import TensorSpec

TextOf = Callable[[Column], str]
"""Tells a size by a text; Obstacle if it follows from no other."""


def conditions_of(steps: MergedSteps, text_of: TextOf) -> list[str]:
    """All conditions, as texts. Obstacle if the calls themselves don't meet them."""
    return [*_sizes(steps, text_of), *_parts(steps, text_of), *_gaps(steps, text_of)]


def _sizes(steps: MergedSteps, text_of: TextOf) -> Iterator[str]:
    """What has no elements, or one, is broadcast or skipped by rules of its own."""
    for column in steps.sizes():
        if min(column) < LEAST:
            raise Obstacle(TOO_SMALL)
        yield f"{text_of(column)} >= {LEAST}"


def _parts(steps: MergedSteps, text_of: TextOf) -> Iterator[str]:
    """A part of a tensor isn't all of it: Python's `x[:n]` makes no slice then."""
    for node in steps.slices:
        of_base, of_part = steps.specs[node.reads[0]], steps.specs[node.makes[0]]
        n = len(of_base)
        for sizes in zip(*[one.size for one in (*of_base, *of_part)], strict=True):
            base, part = sizes[:n], sizes[n:]
            varies = len({*base}) > 1 or len({*part}) > 1
            if varies and all(a > b for a, b in zip(base, part, strict=True)):
                yield f"{text_of(base)} > {text_of(part)}"


def _gaps(steps: MergedSteps, text_of: TextOf) -> Iterator[str]:
    """What isn't contiguous stays so: what is, `contiguous()` doesn't copy."""
    for step in steps.steps:
        specs = steps.specs[step.slot] if isinstance(step, Leaf) else ()
        if len({*specs}) < 2:
            continue
        are_dense = {spec.stride == _dense(spec) for spec in specs}
        if len(are_dense) > 1:
            raise Obstacle("a tensor is contiguous at some sizes alone")
        if are_dense == {False}:
            dense = zip(*map(_dense, specs), strict=True)
            strides = zip(*[spec.stride for spec in specs], strict=True)
            pairs = [pair for pair in zip(dense, strides, strict=True) if pair[0] != pair[1]]
            yield f"({' or '.join(f'{text_of(a)} != {text_of(b)}' for a, b in pairs)})"


def _dense(spec: TensorSpec) -> tuple[int, ...]:
    return dense_strides(range(len(spec.size)), spec.size)
