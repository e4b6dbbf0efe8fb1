"""A kernel is remembered by the form of its launch: what Triton would compile anew must have another form."""

import itertools
import random

import pytest
import torch

pytest.importorskip("triton")
from hopper_cases import three
from ptx_launch import TARGET, Emulator
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from attemper import attend, read
from attemper._backends.cuda import _ready
from attemper._reading import MEASURED

BACKEND = make_backend(TARGET)


class Binder(Emulator):
    """Launches nothing; compares what Triton would look at with what it was for the same form."""

    def __init__(self):
        super().__init__()
        self.seen, self.binders = {}, {}

    def launch(self, kernel, programs, arguments, *, form=None, **options):
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        version = dict(zip(kernel.arg_names, map(str, self.binders[kernel](*arguments)[1]), strict=True))
        key = kernel, _ready.form_of_all(kernel, arguments) if form is None else form, *options.values()
        known = self.seen.setdefault(key, version)
        assert not {name: (known[name], x) for name, x in version.items() if x != known[name]}, kernel.__name__


@pytest.fixture
def binder(monkeypatch):
    binder = Binder()
    binder.pretend(monkeypatch)
    return binder


def statistics():
    """Every one alone and with every other, in an order that is another each time and the same in each run."""
    found = ["all", "none", *((name,) for name in MEASURED), *itertools.combinations(MEASURED, 2)]
    for seed in range(2):
        random.Random(seed).shuffle(found)
        yield from found


@pytest.mark.parametrize("causal", [False, True])
def test_which_statistics_are_asked_for(binder, causal):
    q, k, v = three()
    for stats in statistics():
        attend(q, k, v, backend="cuda", is_causal=causal, stats=stats)
        if stats != "none":
            read(q, k, backend="cuda", is_causal=causal, stats=stats)
    assert len(binder.seen) > 10


OPTIONS = {
    "scale": [None, 0.3, torch.tensor(0.3), torch.tensor([0.1, 0.2, 0.3])[1:], torch.tensor([0.1, 0.2]).half()],
    "sinks": [None, torch.zeros(2), torch.zeros(3)[1:]],
    "window": [None, (1, 0), (16, None), (30, 30)],
    "key_lengths": [None, "half"],
    "softcap": [None, 2.0],
    "stats": ["all", "none", "entropy", "score_std", "pressure"],
}


def laid_out(x, how):
    """The same numbers, elsewhere in memory."""
    if how == "off":
        return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    if how == "turned":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "apart":
        return torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)[..., :-1].copy_(x)
    return x.expand(x.shape) if how == "as it is" else x[:, :1].expand(x.shape)


LAYOUTS = ("as it is", "off", "turned", "apart", "shared")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.filterwarnings("ignore:.*does not track gradients")
def test_operands_and_options(binder, seed):
    draw = random.Random(seed)
    for _ in range(120):
        queries, keys = draw.choice([(200, 200), (200, 300), (64, 1), (1, 300), (128, 0)])
        operands = [laid_out(x, draw.choice(LAYOUTS)) for x in three(queries, keys, draw.choice([64, 128]))]
        options = {name: draw.choice([found[0], *found]) for name, found in OPTIONS.items()}
        if options["key_lengths"]:
            options["key_lengths"] = torch.tensor([keys // 2])
        options["is_causal"] = draw.choice([False, True])
        if draw.random() < 0.5:
            leaves = [x.requires_grad_() if x.is_leaf else x.detach().requires_grad_() for x in operands]
            output = attend(*leaves, backend="cuda", **options).output
            grad = laid_out(torch.ones_like(output), draw.choice(LAYOUTS))
            torch.autograd.grad(output, leaves, grad)
        else:
            attend(*operands, backend="cuda", **options)
    assert len(binder.seen) > 50
