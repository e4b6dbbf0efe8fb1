"""What the training study learns from, and the words for one of its conditions."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._errors import OptionError, explain
from ._statistics import generator

TASKS = ("text", "digits")
RULES = ("unscaled", "sqrt_dk", "dk", "sqrt_dmodel", "cosine", "qk_norm", "additive")
INITIALISERS = ("unit", "gpt")

BLOCK = 4096
"""Bytes of text that stay together: every eighth block is kept from training, and no window crosses its ends."""
EVERY = 8
BYTES = 256
SIDE, PATCH, CLASSES = 8, 2, 10
FEWEST = 3
"""Images of which one can be kept from training."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One condition of the study."""

    task: str
    rule: str
    initialiser: str
    head_dim: int
    depth: int
    learning_rate: float

    def __str__(self) -> str:
        return (
            f"{self.task}, {self.rule}, head width {self.head_dim}, depth {self.depth}, "
            f"learning rate {self.learning_rate:g}, {self.initialiser}"
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every run of a study has alike."""

    steps: int
    batch: int
    """Sequences of text in a step."""
    images: int
    """Images in a step."""
    context: int
    """Bytes in a sequence."""
    width: int
    heads: int
    widening: int
    """How much wider than the model the layer between its two is."""
    validation: int
    """Sequences or images that a loss is measured on."""
    length: int
    """Bytes of the text that are used."""
    text: str | None
    digits: str | None


class Data(NamedTuple):
    """What a task is trained and tested on."""

    train: Any
    """Blocks of bytes, or images as patches."""
    validation: Any
    train_labels: Any
    """None for text, whose labels are its own next bytes."""
    validation_labels: Any
    digest: str
    """The SHA-256 of what was read: no two versions of Python bring the same text."""
    size: int
    """Bytes or images in all."""


# What is learned from


@contextmanager
def opening(knob: str, path: object, fix: str, what: str = "read") -> Iterator[None]:
    """A file that the system does not open, as an error that names the knob and says what to do."""
    try:
        yield
    except OSError as error:
        raise OptionError(explain(f"{knob} {str(path)!r} cannot be {what}: {error.strerror}.", fix)) from None


def load(task: str, settings: Settings, seed: int) -> Data:
    """The data of a task; the seed decides which images are kept from training."""
    return _text(settings) if task == "text" else _digits(settings, seed)


def _text(settings: Settings) -> Data:
    if settings.text is not None:
        with opening("text", settings.text, f"Pass a file of at least {EVERY * BLOCK} bytes."):
            content = Path(settings.text).read_bytes()
    else:
        # The one long text that every Python carries.
        from pydoc_data.topics import topics

        content = "\n".join(topics[name] for name in sorted(topics)).encode()
    content = content[: settings.length]
    blocks = len(content) // BLOCK
    if blocks < EVERY or settings.context >= BLOCK:
        fix = f"Give at least {EVERY * BLOCK} bytes of text, and a context below {BLOCK}."
        raise OptionError(explain(f"The text has {len(content)} bytes, the context {settings.context}.", fix))
    parts = np.frombuffer(content, dtype=np.uint8)[: blocks * BLOCK].reshape(blocks, BLOCK).astype(np.int64)
    kept = np.arange(blocks) % EVERY == EVERY - 1
    digest = hashlib.sha256(content).hexdigest()
    return Data(parts[~kept], parts[kept], None, None, digest, len(content))


@cache
def _images(path: str | None) -> tuple[Any, Any]:
    if path is not None:
        return _images_in(path)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images, bunch.target


def _images_in(path: str) -> tuple[Any, Any]:
    wanted = f"images, n × {SIDE} × {SIDE}, and labels, n whole numbers from 0 to {CLASSES - 1}; n at least {FEWEST}."
    fix = f"Pass an .npz file with {wanted}"
    # Opened here: NumPy says of what it does not know that it may be unsafe to read.
    with opening("digits", path, fix):
        content = io.BytesIO(Path(path).read_bytes())
    try:
        with np.load(content) as file:
            images, labels = file["images"], file["labels"]
        right = images.shape == (len(labels), SIDE, SIDE) and images.dtype.kind in "uif" and len(labels) >= FEWEST
        right = right and labels.ndim == 1 and bool(np.isin(labels, range(CLASSES)).all())
    except Exception:  # NumPy, zip files and pickles have each their own
        right = False
    if not right:
        raise OptionError(explain(f"digits {path!r} holds no images of digits.", fix))
    return images, labels


def _digits(settings: Settings, seed: int) -> Data:
    images, labels = _images(settings.digits)
    images, labels = np.asarray(images, dtype=np.float32), np.asarray(labels, dtype=np.int64)
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    across = SIDE // PATCH
    patches = images.reshape(-1, across, PATCH, across, PATCH).transpose(0, 1, 3, 2, 4).reshape(-1, across**2, PATCH**2)
    order = generator(seed, "split").permutation(len(patches))
    train, validation = np.split(order, [len(order) * 2 // 3])
    # Mean 0 and variance 1, as the initialisers suppose.
    mean, spread = patches[train].mean(), patches[train].std()
    patches = (patches - mean) / spread
    return Data(patches[train], patches[validation], labels[train], labels[validation], digest, len(images))


def batches(data: Data, cell: Cell, settings: Settings, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    """Batches without end: random windows of the text, or the images in ever new orders."""
    if cell.task == "text":
        while True:
            yield windows(data.train, settings.batch, settings.context, rng)
    while True:
        order = rng.permutation(len(data.train))
        for start in range(0, max(1, len(order) - settings.images + 1), settings.images):
            taken = order[start : start + settings.images]
            yield data.train[taken], data.train_labels[taken]


def windows(blocks: Any, count: int, context: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Random windows of the text, and the bytes that follow each of theirs."""
    rows = rng.integers(0, len(blocks), count)
    starts = rng.integers(0, BLOCK - context, count)
    taken = blocks[rows[:, None], starts[:, None] + np.arange(context + 1)]
    return taken[:, :-1], taken[:, 1:]


def held(data: Data, cell: Cell, settings: Settings, seed: int) -> dict[str, tuple[Any, Any]]:
    """What losses are measured on, the same for every rule: as much of what is trained on as of what is not."""
    rng = generator(seed, "held", cell.task)
    if cell.task == "text":
        return {
            "training": windows(data.train, settings.validation, settings.context, rng),
            "validation": windows(data.validation, settings.validation, settings.context, rng),
        }
    seen, unseen = (rng.permutation(len(x))[: settings.validation] for x in (data.train, data.validation))
    return {
        "training": (data.train[seen], data.train_labels[seen]),
        "validation": (data.validation[unseen], data.validation_labels[unseen]),
    }
