"""Two tasks share one trunk, and the weight of one starves it. forewarn says so, and GradNorm repairs it.

python examples/multitask.py                    # weight 1 : 0.001
python examples/multitask.py --balance gradnorm # the same start, balanced during training
"""

import argparse
import tempfile

import torch

from forewarn.lab.data import bursts
from forewarn.lab.dual_task import DualTaskLSTM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balance", choices=["gradnorm", "uncertainty"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--result-dir", help="by default a temporary directory")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = bursts(num_samples=2000, length=24)
    model = DualTaskLSTM()
    model.fit(
        data.sequences,
        data.types,
        data.starts,
        data.ends,
        epochs=given.epochs,
        task_weights={"type": 0.001},
        balance=given.balance,
        monitor_gradients=True,
        result_dir=given.result_dir or tempfile.mkdtemp(),
    )
    right = (model.predict(data.sequences).types == data.types).float().mean()
    print(f"the type is right for {right:.0%} of all sequences")


if __name__ == "__main__":
    main()
