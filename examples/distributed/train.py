"""Trains a small language model on sequences that are divided among processes.

    torchrun --nproc-per-node 2 examples/distributed/train.py [--steps 20] [--length 512] [--compare]

With NVIDIA GPUs each process takes one, and NCCL moves K and V; without, gloo does it on the CPU. --compare trains the
same model once more in each process alone, with the whole sequence, and prints how far the losses differ.
"""

import argparse
import os

import torch
import torch.distributed as dist

import numba_flash
from numba_flash.distributed import context_parallel_attention, shard

VOCABULARY, WIDTH, HEADS, HEADS_KV = 64, 64, 4, 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.q = torch.nn.Linear(WIDTH, WIDTH)
        self.kv = torch.nn.Linear(WIDTH, 2 * WIDTH // HEADS * HEADS_KV)
        self.out, self.up, self.down = (torch.nn.Linear(n, m) for n, m in ((64, 64), (64, 256), (256, 64)))

    def forward(self, x, attend):
        normed = self.norm1(x)
        q = self.q(normed).unflatten(2, (HEADS, -1)).transpose(1, 2)  # (batch, heads, tokens, head_dim)
        k, v = self.kv(normed).unflatten(2, (2, HEADS_KV, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    """Positions come from ALiBi, which needs none of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, attend):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


def batch(step, length, device):
    """(2, length + 1) tokens that count up from anywhere, equal in all processes."""
    first = torch.randint(VOCABULARY, (2, 1), generator=torch.Generator().manual_seed(step))
    return ((first + 3 * torch.arange(length + 1)) % VOCABULARY).to(device)


def train(steps, length, device, group):
    """-> the losses. group=None: this process has all tokens."""
    torch.manual_seed(0)  # all processes begin with the same weights
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    options = dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device))
    losses = []
    for step in range(steps):
        tokens = batch(step, length, device)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        if group is None:
            attend = lambda q, k, v: numba_flash.attention(q, k, v, **options)  # noqa: E731
        else:
            # What has a value for each token is divided in the same way; labels before they are shifted would not be.
            inputs, labels = shard(inputs, group, dim=1), shard(labels, group, dim=1)
            attend = lambda q, k, v: context_parallel_attention(q, k, v, group, seqlen=length, **options)  # noqa: E731
        scores = model(inputs, attend)
        # The mean over the tokens of all processes: each adds its own share.
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * length)
        optimizer.zero_grad()
        loss.backward()  # dk and dv of attention are already those of all tokens
        loss = loss.detach()
        if group is not None:
            for x in (*(parameter.grad for parameter in model.parameters()), loss):  # each is its own tokens' share
                dist.all_reduce(x, group=group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--compare", action="store_true")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    losses = train(arguments.steps, arguments.length, device, dist.group.WORLD)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    if arguments.compare:
        alone = train(arguments.steps, arguments.length, device, None)
        if dist.get_rank() == 0:
            print(f"one process: largest difference {max(abs(a - b) for a, b in zip(losses, alone, strict=True)):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
