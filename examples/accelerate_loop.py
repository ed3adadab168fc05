"""A loop of Accelerate with gradient accumulation, watched.

pip install 'forewarn[accelerate]'
python examples/accelerate_loop.py      # or: accelerate launch examples/accelerate_loop.py
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from forewarn.integrations.accelerate import watch


def main(run: str | Path = "runs/accelerate", epochs: int = 2) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(torch.randn(1024, 8), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with watch(accelerator, model, optimizer, run) as monitor:
        for _ in range(epochs):
            for inputs in loader:
                with accelerator.accumulate(model):
                    loss = (model(inputs) - inputs[:, :1].abs()).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    monitor.step(loss)  # after every micro-batch: one step of the optimizer is one of the run
    accelerator.end_training()


if __name__ == "__main__":
    main()
