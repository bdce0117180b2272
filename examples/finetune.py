"""Fine-tune a model of transformers with its `Trainer`, and one line more for `replay`.

    python examples/finetune.py

teaches a small new BERT to tell whether a sentence praises. The program makes the sentences, such
as "the food was not bad but the music was awful", of which the last half decides. It prints

    step 50: loss 0.6985
    ...
    step 300: loss 0.0989
    300 steps in 5.0 s
    accuracy on 512 other sentences: 1.000

`--model NAME_OR_PATH` takes a checkpoint and its tokenizer instead. `--eager` leaves the line out.
It needs `pip install transformers accelerate`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import torch
import transformers as hf

import lazy_tensor

THINGS = ["food", "film", "music", "hotel", "story", "weather", "service", "view"]
GOOD = ["good", "great", "lovely", "superb", "nice", "charming"]
BAD = ["bad", "awful", "poor", "boring", "dull", "horrible"]
MODIFIERS = {"": False, "very ": False, "quite ": False, "not ": True, "hardly ": True}
"""Words before an adjective, and whether they reverse its meaning."""
N_HELD_OUT = 512
Row = dict[str, Any]


def sentence(chance: random.Random) -> tuple[str, int]:
    """A sentence of two halves, and its label: 1 if the second half praises, else 0."""
    halves, label = [], 0
    for thing in chance.sample(THINGS, 2):
        modifier, is_good = chance.choice(list(MODIFIERS)), chance.random() < 0.5
        halves.append(f"the {thing} was {modifier}{chance.choice(GOOD if is_good else BAD)}")
        label = int(is_good != MODIFIERS[modifier])
    return " but ".join(halves), label


def rows(n_rows: int, tokenizer: Any, seed: int) -> list[Row]:
    """Sentences in the form that `Trainer` takes: padded tokens, a mask and a label each."""
    chance = random.Random(seed)
    sentences, labels = zip(*(sentence(chance) for _ in range(n_rows)), strict=True)
    tokens = tokenizer(list(sentences), padding=True)
    return [
        {"labels": label, **{name: values[i] for name, values in tokens.items()}}
        for i, label in enumerate(labels)
    ]


def small_bert() -> tuple[Any, Any]:
    """A BERT with random weights, and a tokenizer that knows the words of the sentences."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["the", "was", "but", *THINGS, *GOOD, *BAD, *" ".join(MODIFIERS).split()]
    tokenizer = hf.BertTokenizer(vocab={word: i for i, word in enumerate(special + words)})
    config = hf.BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=16,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config), tokenizer


def checkpoint(name_or_path: str) -> tuple[Any, Any]:
    """A pretrained model with a new classifier, and its tokenizer."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(name_or_path, num_labels=2)
    return model, hf.AutoTokenizer.from_pretrained(name_or_path)


class Printer(hf.TrainerCallback):
    """Prints the losses of training, and how long training took."""

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs = others["logs"]
        if "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.4f}")
        if "train_runtime" in logs:
            print(f"{state.global_step} steps in {logs['train_runtime']:.1f} s")


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean().item()}


def trainer_of(model: Any, tokenizer: Any, folder: str, n_steps: int) -> hf.Trainer:
    arguments = hf.TrainingArguments(
        output_dir=folder, max_steps=n_steps, per_device_train_batch_size=16,
        per_device_eval_batch_size=64, learning_rate=5e-4, logging_steps=max(1, n_steps // 6),
        save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = hf.Trainer(
        model, arguments, train_dataset=rows(16 * n_steps, tokenizer, seed=0),
        eval_dataset=rows(N_HELD_OUT, tokenizer, seed=1), compute_metrics=accuracy,
        callbacks=[Printer()],
    )  # fmt: skip
    # the usual one prints a dict for each log
    trainer.remove_callback(hf.PrinterCallback)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="a checkpoint to start from")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eager", action="store_true", help="without lazy-tensor")
    options = parser.parse_args()

    # one thread leaves a core to the compiler, which builds kernels in the background
    torch.set_num_threads(1)
    hf.set_seed(0)
    model, tokenizer = checkpoint(options.model) if options.model else small_bert()
    # the line: `model` stays the same module, but its forward and backward are replayed
    if not options.eager:
        lazy_tensor.replay(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, tokenizer, folder, options.steps)
        trainer.train()
        found = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on {N_HELD_OUT} other sentences: {found:.3f}")


if __name__ == "__main__":
    main()
