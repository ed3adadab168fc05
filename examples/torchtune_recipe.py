"""A recipe in the style of torchtune, watched by forewarn: three lines in it are ours.

python examples/torchtune_recipe.py                       # a new run in recipe/forewarn
python examples/torchtune_recipe.py --resume --epochs 4   # go on after the last checkpoint, in the same run

torchtune itself is not needed: its recipes are plain classes with `setup`, `train`, `save_checkpoint` and `cleanup`.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional

import forewarn
from forewarn.lab.gpt import GPT, GPTConfig

ACCUMULATION, MAX_NORM = 2, 1.0


class FullFinetuneRecipe:
    """Trains all weights of a small GPT to count."""

    def setup(self, folder: Path, resume: bool) -> None:
        torch.manual_seed(0)
        self.checkpoint = folder / "recipe_state.pt"
        self.model = GPT(GPTConfig(vocab_size=32, context=16, width=32, depth=2, heads=2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.monitor = forewarn.watch(self.model, self.optimizer, folder / "forewarn", resume=resume)  # 1
        self.epochs_run = 0
        if resume:
            state = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.monitor.load_state_dict(state["monitor"])
            self.epochs_run = state["epochs_run"]

    def batches(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(epoch)
        starts = torch.randint(32, (10 * ACCUMULATION, 8, 1), generator=generator)
        return (starts + torch.arange(17)) % 32

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            losses = []
            for batch in self.batches(epoch):
                logits = self.model(batch[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / ACCUMULATION
                loss.backward()
                losses.append(loss.detach())
                if len(losses) == ACCUMULATION:
                    self.monitor.clip_grad_norm_(MAX_NORM)  # 2: in place of torch.nn.utils.clip_grad_norm_
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.monitor.step(sum(losses))  # 3: the loss of the whole step
                    losses = []
            self.epochs_run = epoch + 1
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "monitor": self.monitor}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"epochs_run": self.epochs_run}, self.checkpoint)

    def cleanup(self) -> None:
        self.monitor.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("recipe"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)
    recipe = FullFinetuneRecipe()
    recipe.setup(given.folder, given.resume)
    recipe.train(given.epochs)
    recipe.cleanup()


if __name__ == "__main__":
    main()
