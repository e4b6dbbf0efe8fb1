"""Two small tasks that need attention and can be learnt in seconds, and the training on them.

Both are noisy, so that the loss has a floor above zero and the best temperature is a finite one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 32
LENGTH = 64


def periodic(batch: int, length: int, vocabulary: int, period: int = 8, noise: float = 0.2) -> Tensor:
    """Each token repeats the one `period` before it, but for one in five, which is drawn anew."""
    fresh = torch.randint(vocabulary, (batch, length))
    drawn = torch.rand(batch, length) < noise
    ids = fresh.clone()
    for t in range(period, length):
        ids[:, t] = fresh[:, t].where(drawn[:, t], ids[:, t - period])
    return ids


def hidden_patch(batch: int) -> tuple[Tensor, Tensor]:
    """(images (batch, 1, 20, 20), classes): one patch of 25 shows one of ten patterns, all is under noise."""
    patterns = torch.randn(10, 4, 4, generator=torch.Generator().manual_seed(7))
    classes = torch.randint(10, (batch,))
    images = torch.randn(batch, 1, 20, 20)
    for i in range(batch):
        row, column = (4 * int(x) for x in torch.randint(5, (2,)))
        images[i, 0, row : row + 4, column : column + 4] += 1.2 * patterns[classes[i]]
    return images, classes


def gpt_batch(batch: int, padded: bool):
    ids = periodic(batch, LENGTH + 1, VOCABULARY)
    ids, targets = ids[:, :-1], ids[:, 1:].clone()
    kwargs = {}
    if padded:
        # On the left, where a causal row could see it.
        lengths = torch.linspace(LENGTH // 2, LENGTH, batch).long()
        mask = torch.arange(LENGTH)[None] >= LENGTH - lengths[:, None]
        ids, targets = ids.where(mask, 0), targets.where(mask, -100)
        kwargs["attention_mask"] = mask.long()

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return (ids,), kwargs, loss


def vit_batch(batch: int):
    images, classes = hidden_patch(batch)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), classes)

    return (images,), {}, loss


def train(model: nn.Module, batches: Callable[[], Any], seed: int, steps: int = 250, rate: float = 5e-3) -> None:
    """Train with a rate that falls to nothing, so that the weights stand where the gradient is about zero."""
    torch.manual_seed(seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    threads = torch.get_num_threads()
    # These matrices are too small to share: a second thread mostly waits.
    torch.set_num_threads(1)
    try:
        for _ in range(steps):
            args, kwargs, loss = batches()
            optimizer.zero_grad()
            loss(model(*args, **kwargs)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    finally:
        torch.set_num_threads(threads)


def trained_weights(key: str, make: Callable[[], nn.Module], batches: Callable[[], Any], seed: int, rate: float):
    """The weights of `make()` after training; kept in the temporary folder, under the sources that made them."""
    sources = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("tasks.py", "modules.py"))
    mark = hashlib.sha256(sources + f"{key}/{seed}/{rate}/{torch.__version__}".encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / "attemper-zoo" / f"{mark}.pt"
    if kept.exists():
        return torch.load(kept, weights_only=True)
    torch.manual_seed(seed)
    model = make()
    train(model, batches, seed, rate=rate)
    weights = model.state_dict()
    kept.parent.mkdir(exist_ok=True)
    # Written aside first: another process may be reading.
    aside = kept.with_suffix(f".{os.getpid()}")
    torch.save(weights, aside)
    aside.rename(kept)
    return weights


def refit(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Load weights of q_proj, k_proj, v_proj and out_proj into a model that names or joins them otherwise."""
    wanted = model.state_dict()
    loaded = {}
    for name in wanted:
        stem, _, last = name.rpartition(".")
        stem = stem.removesuffix(".out_proj").removesuffix(".qkv").removesuffix(".proj")
        if name in weights:
            loaded[name] = weights[name]
        elif "in_proj" in last or ".qkv." in name:
            kind = "weight" if "weight" in last else "bias"
            loaded[name] = torch.cat([weights[f"{stem}.{part}_proj.{kind}"] for part in "qkv"])
        else:
            loaded[name] = weights[f"{stem}.out_proj.{last}"]
    model.load_state_dict(loaded)
