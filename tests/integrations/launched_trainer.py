"""A Hugging Face training in two processes; the tests launch it with torchrun: launched_trainer.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback

from tests.integrations.test_huggingface import arguments, callback
from tests.integrations.tiny import Float64Step, llama, rows, token_losses


class Recorder(TrainerCallback):
    """What rank 0 should read: the loss per token, and the norm of the gradients, of both ranks."""

    def __init__(self):
        self.batches, self.losses, self.norms = [], [], []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        gathered: list = [None, None]
        dist.all_gather_object(gathered, self.batches)
        both = [batch for batches in gathered for batch in batches]
        num_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in both)
        self.losses.append(token_losses(kwargs["model"], both).sum().item() / num_tokens)
        self.norms.append(Float64Step(kwargs["model"], both).norm)
        self.batches = []


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    model = llama()
    model.never_used = nn.Linear(3, 3)  # DDP has to find that it has no gradient
    given = arguments(folder, gradient_accumulation_steps=2, max_grad_norm=0.5, ddp_find_unused_parameters=True)
    trainer = Trainer(model, given, train_dataset=rows(64), callbacks=[callback(views=None)])
    recorder, training_step = Recorder(), trainer.training_step

    def keeping(model, inputs, *args):
        recorder.batches.append(dict(inputs))
        return training_step(model, inputs, *args)

    trainer.training_step = keeping
    trainer.add_callback(recorder)
    trainer.train()
    if trainer.args.process_index == 0:
        (folder / "expected.json").write_text(json.dumps({"losses": recorder.losses, "norms": recorder.norms}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
