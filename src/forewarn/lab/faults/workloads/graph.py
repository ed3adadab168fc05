"""A graph convolution that sees the whole graph at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import community_graph
from forewarn.lab.faults.workload import Trait, workload


class GraphConvolution(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ (x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1 = GraphConvolution(16, 32)
        self.relu = nn.ReLU()
        self.gc2 = GraphConvolution(32, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = functional.dropout(self.relu(self.gc1(x, adjacency)), 0.5, training=self.training)
        logits: Tensor = self.gc2(x, adjacency)
        return logits


@workload(
    "gcn", num_steps=160,
    traits={Trait.FLOATS, Trait.TARGETS, Trait.RELU, Trait.ADAM, Trait.WEIGHT_DECAY, Trait.SMOOTHING, Trait.CLASSES,
            Trait.FULL_BATCH},
)  # fmt: skip
def gcn(session: Session) -> float:
    """A graph convolution with two layers, full batch: one step is one epoch, validated each time; Adam."""
    features, adjacency, labels = community_graph()
    labelled, checked, asked = torch.arange(300), torch.arange(300, 420), torch.arange(420, 600)
    model = GCN()
    session.built(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=session.number("lr", 0.01), weight_decay=1e-2)
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    smoothing = session.number("label_smoothing", 0.0)
    for _ in range(session.num_steps):
        x, y = session.batch(session.pipeline(features), labels)
        model.train()
        optimizer.zero_grad()
        output = model(x, adjacency)
        loss = session.loss(functional.cross_entropy(output[labelled], y[labelled], label_smoothing=smoothing))
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        with evaluating(model):
            output = model(session.pipeline(features), adjacency)
            val_loss = functional.cross_entropy(output[checked], labels[checked]).item()
        monitor.end_epoch(val_loss=val_loss)
    with evaluating(model):
        output = model(session.pipeline(features), adjacency)
        return functional.cross_entropy(output[asked], labels[asked]).item()
