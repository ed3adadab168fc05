"""A recurrent language model with truncated backpropagation through time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import text
from forewarn.lab.faults.workload import Trait, workload

LENGTH = 24
State = tuple[Tensor, Tensor]


class LanguageLSTM(nn.Module):
    def __init__(self, num_symbols: int, width: int = 64) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(num_symbols, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, dropout=0.1)
        self.decoder = nn.Linear(width, num_symbols)

    def forward(self, tokens: Tensor, hidden: State) -> tuple[Tensor, State]:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden

    def init_hidden(self, num: int) -> State:
        return torch.zeros(2, num, 64), torch.zeros(2, num, 64)


def columns(codes: Tensor, num: int) -> Tensor:
    """A text as columns that are read in parallel [length × num]."""
    length = len(codes) // num
    return codes[: length * num].view(num, length).t().contiguous()


@workload("lstm", num_steps=260, traits={Trait.TARGETS, Trait.TOKENS, Trait.STATELESS})
def lstm(session: Session) -> float:
    """An LSTM with two layers learns characters; plain SGD, clipping at 0.5, the state carried from batch to batch."""
    train, held_out, num_symbols = text()
    num = session.count("batch_size", 20)
    source = columns(train, num)
    model = LanguageLSTM(session.count("num_symbols", num_symbols))
    session.built(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=session.number("lr", 5.0))
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    model.train()
    hidden = model.init_hidden(num)
    first = int(torch.randint(200, ()))
    while not session.is_over():
        if first + LENGTH + 1 >= len(source):
            first, hidden = 0, model.init_hidden(num)
        data, targets = source[first : first + LENGTH], source[first + 1 : first + 1 + LENGTH]
        first += LENGTH
        data, targets = session.batch(data, targets)
        model.zero_grad()
        hidden = (hidden[0].detach(), hidden[1].detach())
        output, hidden = model(data, hidden)
        loss = session.loss(criterion(output.flatten(0, 1), targets.flatten()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), session.number("clip", 0.5))
        optimizer.step()
        monitor.step(loss.item())
    checked = columns(held_out, 40)[: 4 * LENGTH]
    with evaluating(model):
        output, _ = model(checked[:-1], model.init_hidden(40))
        return float(criterion(output.flatten(0, 1), checked[1:].flatten()))
