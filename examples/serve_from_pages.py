# %% [markdown]
# # Serving from pages
#
# A server generates text for many users at once. Their requests come and go at any time, and have any lengths. So it
# keeps the keys and values of all of them in one pool of *pages*, and gives a request a new page when its last one is
# full. In each step every request that runs takes part: one that has just come with its whole prompt, the others with
# their last token. This is *continuous batching*. `attention_kvcache` computes such a step in one call. It writes the
# new keys and values to their pages, and attends over them.
#
# The model is tiny and its weights are random: what it writes makes no sense, but it is the same every time. No GPU is
# needed.

# %%
import collections

import numpy as np

import numba_flash

VOCABULARY, WIDTH, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 95, 64, 4, 2, 16, 2  # the characters of ASCII, from 32 on
PAGE, PAGES = 8, 40  # keys of a page, and pages of the pool


def normalised(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


class Model:
    """A transformer over characters, with rotary positions and grouped heads."""

    def __init__(self, seed=0):
        random = np.random.default_rng(seed)

        def weights(rows, columns):
            return (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

        self.embedding, self.head = weights(VOCABULARY, WIDTH), weights(WIDTH, VOCABULARY)
        self.of_qkv = [weights(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM) for _ in range(LAYERS)]
        self.of_o = [weights(HEADS * HEAD_DIM, WIDTH) for _ in range(LAYERS)]
        self.up, self.down = ([weights(*x) for _ in range(LAYERS)] for x in ((WIDTH, 256), (256, WIDTH)))
        angles = np.outer(np.arange(1024), 10_000 ** -np.arange(0, 1, 2 / HEAD_DIM))
        self.rotary = dict(
            rotary_cos=np.cos(angles).astype(np.float32),
            rotary_sin=np.sin(angles).astype(np.float32),
            rotary_interleaved=False,
        )

    def step(self, tokens, pools, **where):
        """tokens: of all requests, one after the other. pools: K and V of each layer. -> logits of every token."""
        x = self.embedding[tokens]
        for layer, (k_pool, v_pool) in enumerate(pools):
            qkv = (normalised(x) @ self.of_qkv[layer]).reshape(len(tokens), -1, HEAD_DIM)
            q, k, v = np.split(qkv, [HEADS, HEADS + HEADS_KV], axis=1)
            o = numba_flash.attention_kvcache(
                q, k_pool, v_pool, k_new=k, v_new=v, causal=True, layout="bshd", **self.rotary, **where
            )
            x = x + o.reshape(len(tokens), -1) @ self.of_o[layer]
            x = x + np.maximum(normalised(x) @ self.up[layer], 0) @ self.down[layer]
        return normalised(x) @ self.head


# %% [markdown]
# ## The server
#
# A request has its pages, in order, and how many keys are in them. `step` says which requests take part, gives them
# pages, and makes the arrays that describe the step:
#
# | array | says |
# | --- | --- |
# | `cu_seqlens_q` | where the new tokens of each request begin and end |
# | `seqlens_k` | how many keys each request has already |
# | `page_indptr`, `page_indices` | the pages of each request |


# %%
class Request:
    def __init__(self, name, prompt, most):
        self.name, self.new, self.left = name, [ord(c) - 32 for c in prompt], most
        self.pages, self.keys = [], 0

    def needed(self):
        """How many pages it lacks for its new tokens."""
        return -(-(self.keys + len(self.new)) // PAGE) - len(self.pages)


class Server:
    def __init__(self, model):
        shape = (PAGES, PAGE, HEADS_KV, HEAD_DIM)
        self.model, self.free = model, list(range(PAGES))
        self.pools = [[np.full(shape, np.nan, np.float32) for _ in "kv"] for _ in range(LAYERS)]
        self.waiting, self.running = collections.deque(), []

    def submit(self, name, prompt, most=12):
        self.waiting.append(Request(name, prompt, most))

    def admit(self):
        """Requests begin while there are pages for the whole of them, so that none has to be stopped."""
        promised = sum(-(-(r.keys + len(r.new) + r.left) // PAGE) - len(r.pages) for r in self.running)
        while self.waiting:
            request = self.waiting[0]
            promised += -(-(len(request.new) + request.left) // PAGE)
            if promised > len(self.free):
                return
            self.running.append(self.waiting.popleft())

    def step(self):
        """One step of all requests that run: yields (name, character) of each."""
        self.admit()
        for request in self.running:
            request.pages += [self.free.pop() for _ in range(request.needed())]
        batch = self.running
        ends = np.cumsum([len(request.new) for request in batch])
        logits = self.model.step(
            np.concatenate([request.new for request in batch]),
            self.pools,
            cu_seqlens_q=np.array([0, *ends], np.int32),
            seqlens_k=np.array([request.keys for request in batch], np.int32),
            page_indptr=np.cumsum([0, *(len(request.pages) for request in batch)]).astype(np.int32),
            page_indices=np.concatenate([request.pages for request in batch]).astype(np.int32),
        )
        for request, last in zip(batch, ends - 1, strict=True):
            request.keys += len(request.new)
            request.new, request.left = [int(logits[last].argmax())], request.left - 1
            yield request.name, chr(32 + request.new[0])
        for request in batch:
            if not request.left:
                self.free += request.pages
        self.running = [request for request in batch if request.left]

    def stream(self):
        """Yields what is generated, as it comes, until nothing is left to do."""
        while self.waiting or self.running:
            yield from self.step()


# %% [markdown]
# ## Requests come and go
#
# Seven requests with prompts of different lengths; the pool has no room for all of them at the same time. Two of them
# come while others run.

# %%
PROMPTS = {
    "Ada": "The engine weaves patterns",
    "Bob": "Hi",
    "Cyd": "A much longer prompt, which fills many pages: " * 2,
    "Dan": "x",
    "Eve": "Once upon a time",
    "Fay": "In the beginning was the word, " * 2,
    "Gus": "Last one",
}
model, texts = Model(), collections.defaultdict(str)
server = Server(model)
for name in list(PROMPTS)[:5]:
    server.submit(name, PROMPTS[name])
for count, (name, character) in enumerate(server.stream()):
    texts[name] += character
    if count == 9:
        server.submit("Fay", PROMPTS["Fay"])
        server.submit("Gus", PROMPTS["Gus"], most=30)
for name, text in texts.items():
    print(f"{name}: {text!r}")

# %% [markdown]
# A request gets the same tokens alone and beside others, because a row's bits do not depend on its neighbours:

# %%
for name, prompt in PROMPTS.items():
    alone = Server(model)
    alone.submit(name, prompt, most=len(texts[name]))
    assert "".join(character for _, character in alone.stream()) == texts[name]
assert sorted(server.free) == list(range(PAGES))
print("Each of them is what it is alone, and all pages are free again.")
