# %% [markdown]
# # Train a language model
#
# A language model of two layers learns to write like numba_flash's own source, character by character. It is trained
# twice from the same weights: with `numba_flash.attention` and with torch's `scaled_dot_product_attention`. The
# losses are the same. The training takes seconds on two CPU cores. It needs torch.

# %%
import inspect

import matplotlib.pyplot as plt
import numpy as np

import numba_flash
from numba_flash.kernels.simt import v1, v2

try:
    import torch
except ImportError:
    raise SystemExit("This example needs torch, which is not installed: pip install torch") from None

torch.set_num_threads(2)

# %% [markdown]
# ## The text
#
# The text is two of our kernels. Each character has a number.

# %%
text = inspect.getsource(v1) + inspect.getsource(v2)
characters = sorted(set(text))
data = torch.tensor([characters.index(c) for c in text])
print(len(text), "characters,", len(characters), "different ones")

# %% [markdown]
# ## The model
#
# The model is a transformer. Only the call of `attend` computes attention. It takes q, k and v of (batch, heads,
# seqlen, head_dim). The model needs two options: `causal` removes later keys, and `alibi_slopes` lower each score in
# proportion to the distance, so that the model needs no learned positions.

# %%
HEADS, WIDTH, SEQLEN = 4, 64, 64


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(len(characters), WIDTH)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, len(characters))

    def forward(self, tokens, attend):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(self.norm(x))


# %% [markdown]
# ## Two attentions
#
# torch's function has no option for slopes. It takes a matrix that is added to the scores and contains the mask too.

# %%
slopes = torch.tensor([0.5**n for n in (1, 2, 4, 8)])


def ours(q, k, v):
    return numba_flash.attention(q, k, v, causal=True, alibi_slopes=slopes)


def torchs(q, k, v):
    place = torch.arange(q.shape[2])
    distance = place[:, None] - place
    added = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)


# %% [markdown]
# ## Training
#
# Both trainings have the same initial weights, the same batches and the same optimizer.


# %%
def train(attend, steps=120):
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - SEQLEN, (16, 1))
        tokens = data[starts + torch.arange(SEQLEN + 1)]
        scores = model(tokens[:, :-1], attend)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, np.array(losses)


model, losses = train(ours)
_, torchs_losses = train(torchs)
for step in (0, 40, 80, 119):
    print(f"step {step:3}: {losses[step]:.4f} with ours, {torchs_losses[step]:.4f} with torch's")
assert losses[-20:].mean() < 0.5 * losses[0]

# %%
fig, axis = plt.subplots(figsize=(6, 3.5))
axis.plot(torchs_losses, color="0.7", linewidth=4, label="torch's attention")
axis.plot(losses, color="tab:blue", linewidth=1, label="numba_flash.attention")
axis.set_xlabel("step")
axis.set_ylabel("loss")
axis.legend()

# %% [markdown]
# Both compute in float32, but in different orders of summation. So they differ by rounding, and the difference grows
# with each training step:

# %%
difference = np.abs(losses - torchs_losses)
for begin, end in ((0, 10), (10, 50), (50, 120)):
    print(f"steps {begin} to {end - 1}: the losses differ by at most {difference[begin:end].max():.1e}")
assert difference[:10].max() < 1e-4

# %% [markdown]
# ## What it has learned
#
# It writes one character after the other, each drawn by its probability. Two layers and five seconds do not make a
# programmer, but the indentation, the names and the brackets are there:

# %%
tokens = [characters.index(c) for c in "        for x in range("]
with torch.no_grad():
    for _ in range(150):
        scores = model(torch.tensor([tokens[-SEQLEN:]]), ours)[0, -1]
        tokens.append(int(torch.multinomial(torch.softmax(scores / 0.5, 0), 1)))
print("".join(characters[t] for t in tokens).rstrip())
