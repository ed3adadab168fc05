# %% [markdown]
# # Questions of your own about a training run
#
# Train a small language model, ask it four questions with one line each, export the answers as HDF5, load them in
# another session and plot them. Run it cell by cell in an editor that knows `# %%`, or as a whole:
#
#     pip install 'forewarn[torch,hdf5]' matplotlib
#     python examples/module_monitor.py

# %%
import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import forewarn
from forewarn.lab.data import TokenBatches, stdlib_text

STEPS, EVERY, WIDTH, HEADS, CONTEXT = 60, 5, 64, 4, 32

# %% [markdown]
# ## A model that logs its attention
#
# `MonitorMixin` lets a module log from inside its own `forward`. While nothing is monitored, `self.is_monitoring` is
# false and nothing is computed.


# %%
class Attention(nn.Module, forewarn.MonitorMixin):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.is_monitoring:
            forewarn.monitor_scaled_dot_product_attention(
                self.get_module_monitor(), self, query, key, value, is_causal=True, activation=mixed
            )
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x))


# %% [markdown]
# ## Four questions
#
# Built-in metrics such as `"rms"` and `"norm"` are computed for all tensors at once; a function may compute anything.
# The reference is the model as it was at first.

# %%
torch.manual_seed(0)
model = Model()
reference = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

monitor = forewarn.ModuleMonitor(monitor_step_fn=lambda step: step % EVERY == 0)
monitor.set_module(model)
monitor.set_reference_module(reference)
monitor.add_activation_metric("rms")  # how large are the activations?
monitor.add_activation_metric("positive", lambda x: (x > 0).float().mean(), metric_regex=r"mlp\.2")  # how many fire?
monitor.add_gradient_metric("norm")  # who gets a gradient?
monitor.add_parameter_difference_metric("distance", lambda now, first: (now - first).norm())  # how far did they go?
check = forewarn.RefinedCoordinateCheck(monitor, modules=r"mlp|head")  # and whose doing is it?

# %% [markdown]
# ## Train
#
# On a monitored step the reference reads the same batch first. The training itself stays the same, bit for bit.

# %%
batches = TokenBatches(stdlib_text(), batch_size=8, context=CONTEXT)
for step in range(STEPS):
    inputs, targets = next(batches)
    if monitor.begin_step(step):
        reference(inputs)
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    check.refined_coordinate_check()
    monitor.monitor_gradients()
    optimizer.step()
    optimizer.zero_grad()
    monitor.monitor_parameters()
    monitor.log_scalar("loss", loss)
    monitor.end_step()

monitor.storage.save_hdf5("metrics.h5")
monitor.close()
print(f"loss {loss.item():.2f} after {STEPS} steps")

# %% [markdown]
# ## Load the answers, here or in another session
#
# `{metric: {step: value}}`; names with slashes are paths in the file, so any HDF5 viewer shows them as folders.

# %%
metrics = forewarn.StorageManager.load_hdf5("metrics.h5")
print(f"{len(metrics)} metrics on {len(metrics['loss'])} steps")

# %% [markdown]
# ## Plot

# %%
import matplotlib  # noqa: E402

matplotlib.use("Agg")  # leave this line out in a notebook
from matplotlib import pyplot as plt  # noqa: E402

MODULES = ["tokens", "attention", "mlp", "head"]
WEIGHTS = ["tokens.weight", "attention.qkv.weight", "mlp.1.weight", "head.weight"]
QUESTIONS = {
    "root mean square of activations": ("activation/{}/rms", MODULES),
    "attention entropy (nats)": ("attention_entropy/{}", [f"attention.head_{head}" for head in range(HEADS)]),
    "gradient norm": ("gradient/{}/norm", WEIGHTS),
    "distance from the start": ("parameter_difference/{}/distance", WEIGHTS),
    "what own updates add": ("RCC (W_t-W_0)x_t/{}/l2norm", ["mlp.1", "mlp.3", "head"]),
    "what is passed on from below": ("RCC W_0(x_t-x_0)/{}/l2norm", ["mlp.1", "mlp.3", "head"]),
}

figure, panels = plt.subplots(2, 3, figsize=(13, 7), layout="constrained", sharex=True)
for (title, (key, names)), panel in zip(QUESTIONS.items(), panels.flat, strict=True):
    for name in names:
        values = metrics[key.format(name)]
        panel.plot(list(values), list(values.values()), label=name)
    panel.set_title(title)
    panel.legend(fontsize=7)
for panel in panels[-1]:
    panel.set_xlabel("step")
figure.savefig("metrics.png", dpi=100)
