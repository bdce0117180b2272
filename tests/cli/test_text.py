"""Training text and batches."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from lazy_tensor.cli.errors import CommandError
from lazy_tensor.cli.text import MAX_BYTES, batches, load_text


def test_default_text_is_python_source_within_the_cap():
    text = load_text(None, context=32)
    assert text.dtype == torch.uint8
    assert 1_000_000 < len(text) <= MAX_BYTES
    assert b"import " in bytes(text[:100_000].tolist())


def test_file_is_read_as_bytes(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)))
    assert load_text(str(tmp_path / "text"), context=4).tolist() == list(range(256))


def test_missing_file_is_a_command_error_with_the_reason(tmp_path):
    with pytest.raises(CommandError, match=r"can't read .*nowhere: No such file or directory"):
        load_text(str(tmp_path / "nowhere"), context=4)


def test_short_text_is_a_command_error_that_says_what_is_needed(tmp_path):
    (tmp_path / "text").write_bytes(b"1234")
    with pytest.raises(CommandError, match=r"text has 4 bytes; a sample takes 5: give a longer"):
        load_text(str(tmp_path / "text"), context=4)


def test_shortest_text_gives_its_one_sample():
    text = torch.tensor([7, 8, 9], dtype=torch.uint8)
    tokens, targets = next(batches(text, batch=2, context=2, seed=0))
    assert tokens.tolist() == [[7, 8]] * 2
    assert targets.tolist() == [[8, 9]] * 2
    assert tokens.dtype == targets.dtype == torch.int64


def test_batches_depend_on_their_seed_alone():
    text = torch.arange(200, dtype=torch.uint8)

    def drawn(seed):
        return [tokens.tolist() for tokens, _ in islice(batches(text, 4, 8, seed), 3)]

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = drawn(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert drawn(1) == first
    assert drawn(3) != first
