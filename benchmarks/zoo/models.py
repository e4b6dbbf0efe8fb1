"""The zoo's own specimens: tiny transformers in each of the ways in which people write attention."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from . import tasks
from .modules import GPT, Attention, DiffusersAttention, Seq2Seq, TimmAttention, ViT
from .specimen import Architecture, Place, Specimen
from .tasks import LENGTH, VOCABULARY


def places(model: nn.Module, dim: int, heads: int, kv_heads: int | None = None) -> tuple[Place, ...]:
    kinds = (Attention, nn.MultiheadAttention, TimmAttention, DiffusersAttention)
    found = []
    for path, module in model.named_modules():
        if isinstance(module, kinds):
            # torch's encoder layer runs attention itself on its fast path.
            aliases = (path.removesuffix(".self_attn"),) if path.endswith(".self_attn") else ()
            found.append(
                Place(
                    path=path,
                    heads=heads,
                    head_dim=dim // heads,
                    model_dim=dim,
                    kv_heads=kv_heads,
                    aliases=aliases,
                )
            )
    return tuple(found)


def spread(model: nn.Module) -> None:
    """Projections of unit variance: scores of standard deviation 1 at 1/√head_dim, and √head_dim without it."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)


def strict(specimen: Specimen) -> Specimen:
    for place in specimen.places:
        module = specimen.module(place)
        if getattr(module, "causal", False):
            module.strict = True
    return specimen


def gpt(seed: int, *, way: str, train: bool = False, padded: bool = False, config: Any = None, **options: Any):
    # Head widths differ between seeds: what holds for one must not be read off the other.
    dim, heads = ((96, 3), (128, 4))[seed % 2] if options.get("kv_heads") is None else (128, 4)
    if config:
        config = SimpleNamespace(**config(dim // heads))
    if "scale_rule" in options:
        options["scale"] = options.pop("scale_rule")(dim // heads)
    model = GPT(dim, heads, 3, LENGTH, way, config=config, **options)
    if seed % 2 == 0:
        spread(model)
    if train:
        # The ways of writing it compute the same: trained once, in the fastest.
        same = {name: value for name, value in options.items() if name not in ("need_weights", "hidden")}
        quick = "matmul" if options.get("softcap") else "sdpa"
        weights = tasks.trained_weights(
            f"gpt {dim} {heads} {sorted(same.items())} {padded}",
            lambda: GPT(dim, heads, 3, LENGTH, quick, **same),
            lambda: tasks.gpt_batch(16, padded),
            seed,
            rate=5e-3,
        )
        tasks.refit(weights, model)
    torch.manual_seed(2000 + seed)
    args, kwargs, loss = tasks.gpt_batch(32 if train else 4, padded)
    return Specimen(
        name="",
        seed=seed,
        model=model,
        args=args,
        kwargs=kwargs,
        # Half of the untrained ones are checked without a loss, as people do.
        loss=loss if train or seed % 2 == 0 else None,
        has_loss=train or seed % 2 == 0,
        trained=train,
        places=places(model, dim, heads, options.get("kv_heads")),
        padded=padded,
        normalised=options.get("qk_norm", False),
        declared=config is not None,
        strict_mask=strict,
    )


def vit(seed: int, *, way: str, train: bool = False, **options: Any) -> Specimen:
    dim, heads = ((128, 4), (128, 2))[seed % 2]
    model = ViT(dim, heads, 3, way, **options)
    if train:
        weights = tasks.trained_weights(
            f"vit {dim} {heads}",
            lambda: ViT(dim, heads, 3, "sdpa"),
            lambda: tasks.vit_batch(32),
            seed,
            rate=2e-3,
        )
        tasks.refit(weights, model)
    torch.manual_seed(2000 + seed)
    args, kwargs, loss = tasks.vit_batch(64 if train else 4)
    return Specimen(
        name="",
        seed=seed,
        model=model,
        args=args,
        kwargs=kwargs,
        loss=loss if train or seed % 2 else None,
        has_loss=train or seed % 2 == 1,
        trained=train,
        places=places(model, dim, heads),
        normalised=options.get("qk_norm", False),
    )


def seq2seq(seed: int, *, way: str, **options: Any) -> Specimen:
    dim, heads = ((128, 4), (128, 2))[seed % 2]
    model = (
        Seq2Seq(dim, heads, 2, 48, way, hidden="finfo", **options) if way != "mha" else Seq2Seq(dim, heads, 2, 48, way)
    )
    ids, decoder_ids = torch.randint(VOCABULARY, (4, 48)), torch.randint(VOCABULARY, (4, 32))
    mask = torch.arange(48)[None] < torch.tensor([48, 40, 30, 20])[:, None]

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), decoder_ids.flatten())

    return Specimen(
        name="",
        seed=seed,
        model=model,
        args=(ids, decoder_ids),
        kwargs={"attention_mask": mask.long()},
        loss=loss,
        has_loss=True,
        places=places(model, dim, heads),
        padded=True,
        strict_mask=strict,
    )


def mup(head_dim: int) -> float:
    return 1 / head_dim


def architectures() -> list[Architecture]:
    """All of them; a name says what is particular."""
    gpts: dict[str, dict[str, Any]] = {
        "sdpa": {"way": "sdpa"},
        "matmul": {"way": "matmul"},
        "einsum": {"way": "einsum"},
        "mha": {"way": "mha"},
        "mha-weights": {"way": "mha", "need_weights": True},
        "sdpa-grouped": {"way": "sdpa", "kv_heads": 2},
        "matmul-grouped": {"way": "matmul", "kv_heads": 2},
        "sdpa-rotary": {"way": "sdpa", "rotary": True},
        "einsum-rotary": {"way": "einsum", "rotary": True},
        "sdpa-qknorm": {"way": "sdpa", "qk_norm": True},
        "matmul-qknorm-rotary": {"way": "matmul", "qk_norm": True, "rotary": True},
        "sdpa-premultiplied": {"way": "sdpa", "premultiplied": True},
        "matmul-premultiplied": {"way": "matmul", "premultiplied": True},
        "einsum-premultiplied-rotary": {"way": "einsum", "premultiplied": True, "rotary": True},
        "sdpa-finfo": {"way": "sdpa", "hidden": "finfo"},
        "matmul-finfo": {"way": "matmul", "hidden": "finfo"},
        "matmul-softcap": {"way": "matmul", "softcap": 30.0},
        "einsum-softcap": {"way": "einsum", "softcap": 20.0},
        "sdpa-window": {"way": "sdpa", "window": 16},
        "matmul-window": {"way": "matmul", "window": 16},
        "sdpa-padded": {"way": "sdpa", "padded": True},
        "matmul-padded": {"way": "matmul", "padded": True, "hidden": "finfo"},
        "einsum-padded": {"way": "einsum", "padded": True},
        "sdpa-mup": {"way": "sdpa", "scale_rule": mup, "config": lambda d: {"mup": True, "head_dim": d}},
        "matmul-multiplier": {
            "way": "matmul",
            "scale_rule": mup,
            "config": lambda d: {"attention_multiplier": 1 / d, "hidden_size": d},
        },
        "sdpa-trained": {"way": "sdpa", "train": True},
        "matmul-trained": {"way": "matmul", "train": True},
        "einsum-rotary-trained": {"way": "einsum", "train": True, "rotary": True},
        "mha-trained": {"way": "mha", "train": True},
        "matmul-softcap-trained": {"way": "matmul", "softcap": 30.0, "train": True, "seeds": (0,)},
        "sdpa-rotary-grouped-trained": {"way": "sdpa", "rotary": True, "kv_heads": 2, "train": True},
        "sdpa-padded-trained": {"way": "sdpa", "padded": True, "train": True, "seeds": (0,)},
        "sdpa-mup-trained": {
            "way": "sdpa",
            "seeds": (1,),
            "train": True,
            "scale_rule": mup,
            "config": lambda d: {"mup": True, "head_dim": d},
        },
        "sdpa-qknorm-trained": {"way": "sdpa", "qk_norm": True, "train": True, "seeds": (0,)},
    }
    vits: dict[str, dict[str, Any]] = {
        "sdpa": {"way": "sdpa"},
        "matmul": {"way": "matmul"},
        "einsum": {"way": "einsum"},
        "mha": {"way": "mha"},
        "encoder": {"way": "encoder"},
        "encoder-norm-first": {"way": "encoder", "norm_first": True},
        "timm": {"way": "timm"},
        "timm-unfused": {"way": "timm", "fused": False},
        "timm-qknorm": {"way": "timm", "qk_norm": True},
        "diffusers": {"way": "diffusers"},
        "diffusers-unfused": {"way": "diffusers", "fused": False},
        "matmul-trained": {"way": "matmul", "train": True},
        "timm-trained": {"way": "timm", "train": True},
        "mha-trained": {"way": "mha", "train": True},
    }
    crosses: dict[str, dict[str, Any]] = {
        "sdpa": {"way": "sdpa"},
        "matmul": {"way": "matmul"},
        "einsum": {"way": "einsum"},
        "mha": {"way": "mha"},
    }
    return [
        # Training takes time: some are trained with one seed only.
        Architecture(name=f"{family}-{name}", seeds=options.pop("seeds", (0, 1)), make=partial(make, **options))
        for family, make, group in (("gpt", gpt, gpts), ("vit", vit, vits), ("seq2seq", seq2seq, crosses))
        for name, options in group.items()
    ]
