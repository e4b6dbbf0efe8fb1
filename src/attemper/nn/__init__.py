"""Attention as torch modules that return what they measured.

    MultiheadAttention   torch.nn.MultiheadAttention with a choice of scale; reads and writes its state
    CosineAttention      scores are cosines over a temperature, and so bounded
    AdditiveAttention    Bahdanau's scores, wᵀtanh(q + k), in linear memory

All have the forward signature of torch.nn.MultiheadAttention, its meaning of masks (True hides), and return
`Attended(output, reading)`.

>>> import torch
>>> layer = MultiheadAttention(32, 4, batch_first=True)
>>> output, reading = layer(torch.randn(2, 10, 32), is_causal=True)
>>> output.shape, reading.entropy.shape
(torch.Size([2, 10, 32]), torch.Size([2, 4, 10]))
"""

from ._additive import AdditiveAttention as AdditiveAttention
from ._cosine import CosineAttention as CosineAttention
from ._multihead import MultiheadAttention as MultiheadAttention

__all__ = ["AdditiveAttention", "CosineAttention", "MultiheadAttention"]
