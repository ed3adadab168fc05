"""A mixture of experts with a learned router."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import text, windows
from forewarn.lab.faults.workload import Trait, workload

WIDTH, NUM_EXPERTS, LENGTH = 48, 4, 16


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 64) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 64, WIDTH) / 8)
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        best, chosen = shares.max(-1)
        mask = functional.one_hot(chosen, NUM_EXPERTS).to(x.dtype)
        self.imbalance = NUM_EXPERTS * (mask.mean((0, 1)) * shares.mean((0, 1))).sum()
        hidden = functional.relu(torch.einsum("btd,edh->bteh", x, self.up))
        outputs = torch.einsum("bteh,ehd->bted", hidden, self.down)
        mixed: Tensor = best[..., None] * (outputs * mask[..., None]).sum(2)
        return mixed


class SparseModel(nn.Module):
    def __init__(self, num_symbols: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_symbols, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, num_symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.mix(self.embed(tokens))
        scores: Tensor = self.head(x + self.experts(self.norm(x)))
        return scores


@workload(
    "moe", num_steps=220,
    traits={Trait.TARGETS, Trait.TOKENS, Trait.ROUTER, Trait.ADAM, Trait.WEIGHT_DECAY, Trait.SCHEDULE, Trait.CLASSES},
)  # fmt: skip
def moe(session: Session) -> float:
    """A recurrent model with four routed experts; Muon for matrices, AdamW for the rest, a balancing loss."""
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(
            f"the workload moe needs torch 2.9 or newer for torch.optim.Muon; this is {torch.__version__}"
        )
    train, held_out, num_symbols = text()
    model = SparseModel(session.count("num_symbols", num_symbols))
    session.built(model)
    matrices = [model.get_parameter(f"mix.weight_{name}_l0") for name in ("ih", "hh")]
    others = [parameter for parameter in model.parameters() if all(parameter is not one for one in matrices)]
    muon = torch.optim.Muon(matrices, lr=session.number("lr", 5e-3), weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=session.number("lr", 5e-3), weight_decay=0.01)
    session.optimizer(muon)
    session.optimizer(adam)
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(one, [120, 180], 0.4) for one in (muon, adam)]
    for scheduler in schedulers:
        session.schedule(scheduler)
    monitor = session.watch(model, [muon, adam], config={"measure": {"router": "router"}})
    size = session.count("batch_size", 24)
    for _ in range(session.num_steps):
        tokens, following = session.batch(*windows(train, size, LENGTH))
        scores = model(tokens)
        loss = functional.cross_entropy(scores.flatten(0, 1), following.flatten())
        loss = session.loss(loss + 0.02 * model.experts.imbalance)
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        muon.step()
        adam.step()
        for scheduler in schedulers:
            scheduler.step()
        monitor.step(loss)
    torch.manual_seed(0)
    with evaluating(model):
        tokens, following = windows(held_out, 128, LENGTH)
        return functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten()).item()
