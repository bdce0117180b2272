"""`transformers.Trainer`, unmodified, computes in the mode and on wrapped models what it does
eagerly.
"""

import shutil
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf

from lazy_tensor import lazy_mode, wrap
from tests.models.entry import tokens
from tests.models.run import outcome_of, plain, state_of, tensors_in
from tests.models.zoo import ZOO

pytestmark = pytest.mark.filterwarnings(
    # DataLoader's, where there is no accelerator to pin memory for
    "ignore:'pin_memory' argument is set as true:UserWarning",
    "ignore:`gradient_checkpointing:FutureWarning",
    "ignore:replay.*goes on recording",
)
ARGUMENTS: dict[str, Any] = {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": True},
    "workers": {"dataloader_num_workers": 2, "eval_strategy": "no"},
    "checkpointing": {"gradient_checkpointing": True},
    "neftune": {"neftune_noise_alpha": 5.0},
}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen rows of tokens."""

    def __init__(self):
        self.rows = tokens(16, 8)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trainer_of(model, path, **arguments):
    options = hf.TrainingArguments(output_dir=str(path), **{**ARGUMENTS, **arguments})
    return hf.Trainer(model, options, train_dataset=Rows(), eval_dataset=Rows())


def outcome(trainer):
    """What was logged, but for times, and where model and optimizer ended."""
    logged = {
        f"{name} {i}": torch.tensor(value, dtype=torch.double)
        for i, entry in enumerate(trainer.state.log_history)
        for name, value in entry.items()
        if not name.endswith(("runtime", "per_second", "flos"))
    }
    optimizer = trainer.optimizer.state_dict()
    return plain(logged) | state_of(trainer.model) | tensors_in(optimizer["state"], "optimizer")


@pytest.mark.parametrize("way", ["mode", "wrap", "replay"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", ["gpt2", "bert", pytest.param("mixtral", marks=pytest.mark.full)])
def test_trainer_is_bit_equal(model, variant, way, agree, tmp_path):
    def program(model):
        trainer = trainer_of(model, tmp_path / "run", **VARIANTS[variant])
        trainer.train()
        return outcome(trainer)

    entry = ZOO[model]
    expected = outcome_of(program, entry, "eager")
    shutil.rmtree(tmp_path / "run")
    got = outcome_of(program, entry, way)
    agree(got, expected, model=model, variant=f"Trainer {variant}", way=way)


@pytest.mark.parametrize("way", ["mode", "wrap"])
def test_trainer_resumes_from_the_checkpoints_that_eager_writes(way, agree, tmp_path):
    def program(model, path):
        trainer_of(model, path).train()
        again = ZOO["gpt2"].build()
        resumed = trainer_of(wrap(again) if path.name == "wrap" else again, path)
        resumed.train(resume_from_checkpoint=str(path / "checkpoint-2"))
        return outcome(resumed)

    def run(way):
        return outcome_of(partial(program, path=tmp_path / way), ZOO["gpt2"], way)

    expected = run("eager")
    agree(run(way), expected, model="gpt2", variant="Trainer resumed", way=way)
    for step in ("checkpoint-2", "checkpoint-4"):
        mine, theirs = tmp_path / way / step, tmp_path / "eager" / step
        assert {f.name for f in mine.iterdir()} == {f.name for f in theirs.iterdir()}
        name = "model.safetensors"
        assert (mine / name).read_bytes() == (theirs / name).read_bytes()


def test_trainer_predicts(agree, tmp_path):
    def program(model):
        predictions = trainer_of(model, tmp_path).predict(Rows())
        return {"logits": torch.from_numpy(predictions.predictions),
                "labels": torch.from_numpy(predictions.label_ids)}  # fmt: skip

    expected = outcome_of(program, ZOO["llama"], "eager")
    for way in ("mode", "wrap"):
        got = outcome_of(program, ZOO["llama"], way)
        agree(got, expected, model="llama", variant="Trainer predict", way=way)


def test_trained_model_is_used_after_the_mode(tmp_path):
    model = ZOO["gpt2"].build()
    with lazy_mode():
        trainer_of(model, tmp_path, eval_strategy="no").train()
    found = model.eval()(tokens()).logits
    assert type(found) is torch.Tensor
    assert found.isfinite().all()
