"""Lightning's Trainer, watched by one callback. The module itself does not change.

pip install 'forewarn[lightning]'
python examples/lightning_trainer.py
"""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from forewarn.integrations.lightning import ForewarnCallback


class Classifier(LightningModule):
    """Tells apart points inside and outside of a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return functional.cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", functional.cross_entropy(self.net(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(run: str | Path = "runs/lightning", epochs: int = 3) -> None:
    torch.manual_seed(0)
    inputs = 2 * torch.rand(1024, 2) - 1
    data = TensorDataset(inputs, (inputs.norm(dim=1) < 0.8).long())
    train, validation = torch.utils.data.random_split(data, [896, 128])
    trainer = Trainer(
        max_epochs=epochs, callbacks=[ForewarnCallback(run)], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=64))


if __name__ == "__main__":
    main()
