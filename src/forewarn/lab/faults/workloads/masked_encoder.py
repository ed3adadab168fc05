"""An encoder that predicts masked characters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import text, windows
from forewarn.lab.faults.workload import Trait, workload

WIDTH, LENGTH, IGNORED = 48, 24, -100


class MaskedEncoder(nn.Module):
    def __init__(self, num_symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_symbols + 1, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, num_symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(LENGTH))
        scores: Tensor = self.decoder(self.norm(self.encoder(x)))
        return scores


def masked(tokens: Tensor, mask_symbol: int) -> tuple[Tensor, Tensor]:
    """Tokens with a fifth of them masked, and the targets: only the masked ones count."""
    hidden = torch.rand(tokens.shape) < 0.2
    return torch.where(hidden, mask_symbol, tokens), torch.where(hidden, tokens, IGNORED)


@workload("masked-encoder", num_steps=240, traits={Trait.TARGETS, Trait.TOKENS, Trait.ATTENTION, Trait.WARM_UP})
def masked_encoder(session: Session) -> float:
    """A post-norm encoder predicts masked characters; Adafactor, warm-up and inverse square root, tied to nothing."""
    train, held_out, num_symbols = text()
    model = MaskedEncoder(session.count("num_symbols", num_symbols))
    session.built(model)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=session.number("lr", 2e-2))
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    warm_up = session.count("warm_up", 30)
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORED)
    size = session.count("batch_size", 32)
    for step in range(1, session.num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = session.number("lr", 2e-2) * min(step / warm_up, (warm_up / step) ** 0.5)
        tokens, _ = windows(train, size, LENGTH)
        inputs, targets = session.batch(*masked(tokens, num_symbols))
        optimizer.zero_grad()
        loss = session.loss(criterion(model(inputs).transpose(1, 2), targets))
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    torch.manual_seed(0)
    with evaluating(model):
        inputs, targets = masked(windows(held_out, 128, LENGTH)[0], num_symbols)
        return functional.cross_entropy(model(inputs).transpose(1, 2), targets, ignore_index=IGNORED).item()
