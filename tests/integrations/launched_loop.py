"""An Accelerate loop in two processes; the tests launch it with `accelerate launch`: launched_loop.py FOLDER."""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from forewarn.integrations.accelerate import watch
from tests.integrations.test_accelerate import network, prepared, train


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator, num_rows=8 * 16)
    losses, norms, micro_batches = [], [], []

    def compute(inputs, targets):
        """What rank 0 should read: the mean loss, and the norm of the gradients of both ranks."""
        micro_batches.append((inputs.double(), targets.double()))
        if not accelerator.sync_gradients:
            return
        gathered: list = [None, None]
        dist.all_gather_object(gathered, micro_batches)
        twin = network().double()
        twin.load_state_dict(accelerator.unwrap_model(model).state_dict())
        parts = [[(twin(x) - y).square().mean() for x, y in of_rank] for of_rank in gathered]
        (sum(map(sum, parts)) / 4).backward()
        losses.append(sum(part.item() for of_rank in parts for part in of_rank) / 4)
        norms.append(math.sqrt(sum(parameter.grad.square().sum().item() for parameter in twin.parameters())))
        micro_batches.clear()

    with watch(accelerator, model, optimizer, folder / "run", every=1, views=[]) as monitor:
        train(accelerator, model, optimizer, loader, monitor, before_step=compute)
    if accelerator.is_main_process:
        (folder / "expected.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
