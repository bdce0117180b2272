"""Wrapped models are saved, loaded, copied and unwrapped as others are."""

import copy
from functools import partial

import pytest
import torch

from lazy_tensor import is_lazy, unwrap, wrap
from tests.models.run import outcome_of, state_of, training
from tests.models.sample import cases
from tests.models.zoo import ZOO

WAYS = ("mode", "wrap")
# recurrent_gemma keeps states with a history on its modules, which eager can't copy either.
COPIED = [name for name in ZOO if name != "recurrent_gemma"]
PRETRAINED = [name for name, entry in ZOO.items() if hasattr(entry.make(), "save_pretrained")]


@pytest.mark.parametrize(
    ("model", "variant", "way"), cases(dict.fromkeys(PRETRAINED, ["save_pretrained"]), WAYS, 3, 0)
)
def test_saved_and_loaded_models_are_bit_equal(model, variant, way, agree, tmp_path):
    entry = ZOO[model]

    def program(model, path):
        training(entry, n_steps=1)(model)
        model.save_pretrained(path)
        loaded = type(model).from_pretrained(path).train()
        return training(entry, n_steps=1)(wrap(loaded) if path.name == "wrap" else loaded)

    def run(way):
        return outcome_of(partial(program, path=tmp_path / way), entry, way)

    expected = run("eager")
    agree(run(way), expected, model=model, variant=variant, way=way)
    files = {path.name: path.read_bytes() for path in (tmp_path / "eager").iterdir()}
    assert "model.safetensors" in files
    assert files == {path.name: path.read_bytes() for path in (tmp_path / way).iterdir()}


@pytest.mark.parametrize(
    ("model", "variant", "way"), cases(dict.fromkeys(COPIED, ["deepcopy"]), WAYS, 3, 1)
)
def test_copied_models_are_bit_equal(model, variant, way, agree):
    entry = ZOO[model]

    def program(model):
        before = training(entry, n_steps=1)(model)
        twin = copy.deepcopy(model)
        after = training(entry, n_steps=1)(twin)
        assert is_lazy(next(twin.parameters())) or not is_lazy(next(model.parameters()))
        assert all(torch.equal(t, before[name]) for name, t in state_of(model).items())
        return after

    expected = outcome_of(program, entry, "eager")
    agree(outcome_of(program, entry, way), expected, model=model, variant=variant, way=way)


@pytest.mark.parametrize(
    ("model", "variant", "way"), cases(dict.fromkeys(ZOO, ["unwrap"]), ("wrap",), 3, 2)
)
def test_unwrapped_models_go_on_eagerly(model, variant, way, agree):
    entry = ZOO[model]

    def program(model):
        training(entry, n_steps=1)(model)
        model = unwrap(model)
        assert not any(is_lazy(t) for t in [*model.parameters(), *model.buffers()])
        return training(entry, n_steps=1)(model)

    expected = outcome_of(program, entry, "eager")
    agree(outcome_of(program, entry, way), expected, model=model, variant=variant, way=way)
