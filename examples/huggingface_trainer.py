"""Hugging Face's Trainer, watched by one callback.

pip install 'forewarn[huggingface]'
python examples/huggingface_trainer.py

The model is a small Llama with random weights, and its data count upwards: no download is needed.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from forewarn.integrations.huggingface import ForewarnCallback

VOCABULARY, LENGTH = 64, 24


def counting(number: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from a random start."""
    starts = torch.randint(VOCABULARY, (number, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(LENGTH)) % VOCABULARY]


def main(folder: str | Path = "runs/huggingface", steps: int = 60) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    ))  # fmt: skip
    data = counting(512)
    args = TrainingArguments(
        str(folder), max_steps=steps, learning_rate=3e-3, per_device_train_batch_size=16, eval_strategy="steps",
        eval_steps=30, logging_steps=20, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    callback = ForewarnCallback(Path(folder) / "forewarn")
    Trainer(model, args, train_dataset=data[:448], eval_dataset=data[448:], callbacks=[callback]).train()


if __name__ == "__main__":
    main()
