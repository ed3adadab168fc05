"""One training with a bad batch, in one process or several, under a policy that takes one action."""

import contextlib
from typing import Any

import torch
from torch import nn

import forewarn
from forewarn import Finding, Message, Remedy, Series, Severity, finding, rule
from tests.rank_runs import batch, made, split

STEPS, ONSET = 70, 45


class BrokenError(RuntimeError):
    """An optimizer that cannot step."""


TOO_HIGH = 100.0


def raise_the_second(found: Finding, history: Any, info: Any) -> Remedy:
    return Remedy("raise_task_weight", {"from": 1.0, "to": 2.0, "task": "second"}, "it is behind")


@rule(
    "Z901", "loss-out-of-range", reads=("train/loss",), keep=5, remedies=(raise_the_second,),
    message=Message("The loss is out of range", "loss {value} · limit {bound}"),
)  # fmt: skip
def loss_out_of_range(loss: Series) -> Finding | None:
    """The loss is higher than any of this model.

    ## Why is this bad?
    It is a test.

    ## Example
    fires: 2.0x5 900
    quiet: 2.0x5
    """
    return finding(Severity.CRITICAL, loss.last, TOO_HIGH) if not loss.last < TOO_HIGH else None


class Batches:
    """Batches of a training, from any position on."""

    def __init__(self, how: str, rank: int, num_ranks: int) -> None:
        self.split = (how, rank, num_ranks)
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < STEPS:
            self.position += 1
            yield self.position - 1, *batch(self.position - 1, *self.split)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train(
    rank: int, num_ranks: int, how: str, action: str, folder: str, policy: Any = None, is_faulty: bool = True,
    fails: Any = None, make: Any = torch.optim.AdamW,
) -> dict[str, Any]:  # fmt: skip
    """Train to the end, and save what this rank has seen; one batch, wherever it comes, has a loss far too high."""
    torch.manual_seed(3)
    called = split(made(), how)
    optimizer = make(called.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    name = f"{how}-{action}" + "-healthy" * (not is_faulty)
    policy = policy or {
        "rules": {"Z901": action, "non-finite-loss": "notify"},
        "roll_back": {"every": 10}, "lower_lr": {"factor": 0.5}, "skip_batch": {"factor": 5.0, "deviations": 4.0},
    }  # fmt: skip
    monitor = forewarn.watch(
        called, optimizer, f"{folder}/{name}", every=10, views=[], rules=[loss_out_of_range], policy=policy
    )
    seen: dict[str, Any] = {"losses": {}, "lr": [], "moved": [], "weights": [], "actions": [], "stopped_at": None}
    if fails is not None:
        fails(rank, monitor)
    count = 0
    try:
        for step, x, y in monitor.watch_loader(Batches(how, rank, num_ranks)):
            loss = nn.functional.cross_entropy(called(x + 0.01 * torch.randn(x.shape, dtype=x.dtype)), y)
            if action == "rebalance":
                second = loss * 0.5
                combined = monitor.combine_losses({"first": loss, "second": second}, every=1000)
                seen["weights"].append(round(float(((combined - loss) / second).detach()), 6))
                loss = combined
            if is_faulty and count == ONSET:
                loss = loss * 1e5
            count += 1
            loss.backward()
            if action in ("lower_clip", "raise_clip") or (action == "skip_batch" and how == "fsdp2"):
                monitor.clip_grad_norm_(1.0)
            before = local(called)
            with contextlib.suppress(BrokenError):
                optimizer.step()
            seen["moved"].append(any(not torch.equal(a, b) for a, b in zip(before, local(called), strict=True)))
            optimizer.zero_grad()
            outcome = monitor.step(loss)
            seen["actions"] += [(step, one.action) for one in outcome.actions if not one.watched_steps]
            scheduler.step()
            seen["lr"].append(optimizer.param_groups[0]["lr"])
            seen["losses"][step] = float(loss.detach())
            if monitor.should_stop:
                seen["stopped_at"] = step
                break
    finally:
        monitor.close()
    seen["model"] = local(called)
    torch.save(seen, f"{folder}/{name}-{rank}.pt")
    return seen


def local(model: nn.Module) -> list[torch.Tensor]:
    """A copy of what this rank holds of the parameters."""
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def in_turn(rank: int, num_ranks: int, how: str, actions: list[str], folder: str) -> None:
    """Train with several actions: starting processes takes longer than that."""
    for action in actions:
        train(rank, num_ranks, how, action, folder)
    train(rank, num_ranks, how, "roll_back", folder, is_faulty=False)


def assert_it_was_done(action: str, seen: dict[str, Any], healthy: dict[str, Any]) -> None:
    """What each action must have done to a run; `healthy` is the run without the fault, which ends the same way."""
    if action == "roll_back":
        assert seen["losses"] == healthy["losses"]
        assert all(torch.equal(a, b) for a, b in zip(seen["model"], healthy["model"], strict=True))
        assert len(seen["moved"]) > STEPS
        return
    if action == "lower_lr":
        ratios = [now / usual for now, usual in zip(seen["lr"], healthy["lr"], strict=True)]
        first = next(step for step, ratio in enumerate(ratios) if ratio < 0.9)
        assert ONSET <= first <= ONSET + 10
        assert ratios[:first] == [1.0] * first
        assert max(ratios[first:]) < 0.501  # the scheduler does not restore it
        assert min(ratios[first:]) > 0.499
    if action == "skip_batch":
        assert [step for step, moved in enumerate(seen["moved"]) if not moved] == [ONSET]
    else:
        assert all(seen["moved"])
    if action == "rebalance":
        assert seen["weights"][: ONSET + 1] == [1.0] * (ONSET + 1)
        assert seen["weights"][ONSET + 10 :] == [2.0] * (STEPS - ONSET - 10)
    if action == "stop":
        assert ONSET <= seen["stopped_at"] <= ONSET + 10
