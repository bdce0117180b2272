"""Lightning's `Fabric`, unmodified, computes in the mode and on wrapped models what it does
eagerly.
"""

import pytest
import torch
from lightning_fabric import Fabric

from tests.models.run import outcome_of, plain, state_of, tensors_in
from tests.models.zoo import ZOO


def fabric_program(entry, precision, path):
    def program(model):
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        fabric.seed_everything(5, verbose=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        module, optimizer = fabric.setup(model, optimizer)
        losses, norms = [], []
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                with fabric.no_backward_sync(module, enabled=micro == 0):
                    loss = module(**entry.batch()).loss / 2
                    fabric.backward(loss)
                losses.append(loss.item())
            norm = fabric.clip_gradients(module, optimizer, max_norm=1.0)
            assert norm is not None
            norms.append(norm)
            optimizer.step()
            if step == 1:
                fabric.save(path, {"model": module, "optimizer": optimizer, "step": step})
        ended = state_of(model)
        rest = fabric.load(path, {"model": module, "optimizer": optimizer})
        assert rest == {"step": 1}
        moments = tensors_in(optimizer.state_dict()["state"], "optimizer")
        numbers = {"losses": torch.tensor(losses), "norms": torch.stack(norms)}
        loaded = {f"loaded {name}": t for name, t in state_of(model).items()}
        return plain(numbers) | ended | loaded | moments

    return program


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.parametrize("way", ["mode", "wrap", "inside"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", ["gpt2", "t5", "resnet"])
def test_fabric_is_bit_equal(model, precision, way, agree, tmp_path):
    entry = ZOO[model]
    expected = outcome_of(fabric_program(entry, precision, tmp_path / "eager"), entry, "eager")
    got = outcome_of(fabric_program(entry, precision, tmp_path / "lazy"), entry, way)
    agree(got, expected, model=model, variant=f"Fabric {precision}", way=way)
