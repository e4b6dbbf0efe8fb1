"""Models that call this library's own operators are seen like any other, and run as they would unwatched."""

import pytest
import torch

import attemper
from attemper import nn

NAMES = ("pressure", "gradient_flow", "entropy", "max_logit", "score_std", "first_key_weight")


def loss(output):
    return output.square().mean()


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attn = nn.MultiheadAttention(64, 4, batch_first=True, **options)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x, padding=None):
        return self.out(self.attn(x, is_causal=True, key_padding_mask=padding)[0])


class Torchs(torch.nn.Module):
    """The same in torch's own module, which has another road through `watch`."""

    def __init__(self, model):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.attn.load_state_dict(model.attn.state_dict())
        self.out = model.out

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out(self.attn(x, x, x, need_weights=False, attn_mask=hidden)[0])


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 12, 64)


@pytest.mark.parametrize("stats", ["all", "none"])
def test_the_vitals_are_those_of_the_same_model_in_torch(x, stats):
    model = Model(stats=stats)
    own, other = (attemper.check(m, x, loss=loss).vitals for m in (model, Torchs(model)))
    assert len(own) == len(other) == 1
    assert own[0].site.path == "attn"
    assert own[0].site.kind == "attemper"
    for name in NAMES:
        torch.testing.assert_close(getattr(own[0], name), getattr(other[0], name), rtol=1e-4, atol=1e-7)
        assert abs(getattr(own[0], name)).max() > 1e-6


def test_a_missing_scale_is_found(x):
    findings = attemper.check(Model(scale="unscaled"), x, loss=loss).findings
    assert "scale-missing" in [finding.rule for finding in findings]
    assert "scale-missing" not in [finding.rule for finding in attemper.check(Model(), x, loss=loss).findings]


def test_a_probe_changes_the_scale(x):
    model = Model()
    probe = dict(attemper.check(model, x, loss=loss, probe=True).probe)
    for factor, found in probe.items():
        wrong = Model(scale=factor / 4)
        wrong.load_state_dict(model.state_dict())
        assert found == pytest.approx(loss(wrong(x)).item(), rel=1e-5)
    assert len({round(value, 7) for value in probe.values()}) == len(probe)


def test_bits_are_the_same(x):
    model = Model()
    plain = model(x)
    gradient = torch.autograd.grad(loss(plain), model.attn.in_proj_weight)[0]
    with attemper.watch(model, every=1) as monitor:
        watched = model(x)
        loss(watched).backward()
    assert torch.equal(plain, watched)
    assert torch.equal(gradient, model.attn.in_proj_weight.grad)
    assert list(monitor.vitals) == ["attn"]
    assert monitor.vitals["attn"].pressure is not None


def test_scales_that_differ_by_head(x):
    model = Model(scale="learned")
    with torch.no_grad():
        model.attn.log_scale.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]).log())
    site = attemper.check(model, x, loss=loss).vitals[0].site
    assert site.scale_argument == pytest.approx((0.1, 0.2, 0.3, 0.4), rel=1e-5)


def test_what_comes_back_through_dropout_is_that_of_the_call(x):
    class Keeps(Model):
        def forward(self, x):
            output, self.reading = self.attn(x, is_causal=True)
            return self.out(output)

    model = Keeps(dropout=0.5).train()
    with attemper.watch(model, every=1) as monitor:
        loss(model(x)).backward()
    found, own = monitor.vitals["attn"], attemper.Vitals.of(model.reading)
    for name in ("entropy", "gradient_flow"):
        torch.testing.assert_close(getattr(found, name), getattr(own, name), rtol=1e-4, atol=1e-6)
    # The same weights without dropout let another gradient come back.
    alike = Model()
    alike.load_state_dict(model.state_dict())
    with attemper.watch(alike, every=1) as plain:
        loss(alike(x)).backward()
    assert abs(found.gradient_flow - plain.vitals["attn"].gradient_flow).max() > 1e-3


def test_attend_called_by_hand(x):
    class Hand(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x):
            q, k = (f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in (self.q, self.k))
            return attemper.attend(q, k, k, window=(3, 0), softcap=20.0).output

    vital = attemper.check(Hand(), x, loss=loss).vitals[0]
    assert vital.site.softcap == 20.0
    assert vital.site.effective_scale == pytest.approx(0.25)
    model = Hand()
    expected = attemper.read(
        *(f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in (model.q, model.k)), window=(3, 0), softcap=20.0
    )
    found = attemper.check(model, x, loss=loss).vitals[0]
    # Rows with one visible key have no entropy to speak of and are left out of the mean.
    torch.testing.assert_close(
        torch.as_tensor(found.entropy), expected.entropy[..., 1:].mean((0, 2)).double(), rtol=1e-4, atol=1e-6
    )
