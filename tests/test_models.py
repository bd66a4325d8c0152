"""multilevel.py on other people's models and with wrong input; the decoder's details."""

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from model import GPTConfig, attend
from multilevel import coarse_sets, prolong, restrict
from test_multilevel import batch, small_gpt


class Foreign(nn.Module):
    """Somebody else's network: blocks at a dotted path, a buffer, batch norm."""

    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4))
        self.body = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.body["layers"]:
            x = x + layer(x).tanh()
        return self.out(x)


def test_a_foreign_model_at_a_dotted_path():
    torch.manual_seed(0)
    model, x = Foreign(), torch.randn(5, 6)
    model.layers_of_body = model.body  # a second name for the same module changes nothing
    coarse = restrict(model, [1, 3], "body.layers")
    h, layers = x, model.body["layers"]
    for i in (1, 3):
        h = h + layers[i](h).tanh()
    torch.testing.assert_close(coarse(x), model.out(h))
    coarse(x).sum().backward()
    assert layers[0][0].weight.grad is None and layers[1][0].weight.grad.abs().sum() > 0
    want = 0.5 * (layers[2][0].bias + layers[1][0].bias).detach()
    prolong(model, [1, 3], 0.5, "body.layers")
    torch.testing.assert_close(layers[2][0].bias.detach(), want)


class Mixed(nn.Module):
    """Blocks of two kinds; forward looks them up by place, as Hugging Face's hybrid models do."""

    def __init__(self, config):
        super().__init__()
        self.config, self.body = config, nn.Module()
        self.body.config = SimpleNamespace(text_config=config)  # the same, inside another one
        self.body.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(config.n_layer))
        self.scales = tuple(range(1, config.n_layer + 1))

    def forward(self, x):
        config = self.body.config.text_config
        for i, layer in enumerate(self.body.layers[:config.n_layer]):
            kind = torch.tanh if self.config.layer_types[i] == config.kinds[0] else torch.relu
            x = x + self.scales[i] * kind(layer(x))
        return x


@pytest.mark.parametrize("keep", [[1, 3, 5], range(0, 6, 2), [4, 1], range(6)])
def test_a_view_of_blocks_of_several_kinds_runs_each_as_its_own_kind(keep):
    torch.manual_seed(0)
    types, x = ["tanh", "tanh", "relu", "relu", "tanh", "relu"], torch.randn(5, 6)
    config = SimpleNamespace(n_layer=6, n_head=6, layer_types=types, kinds=["tanh", "relu"],
                             use_cache=True)
    fine, as_it_was = Mixed(config), copy.deepcopy(config)
    before = fine(x)
    coarse = restrict(fine, keep, "body.layers")
    shallow = SimpleNamespace(n_layer=len(keep), n_head=6, layer_types=[types[i] for i in keep],
                              kinds=["tanh", "relu"], use_cache=False)  # six heads, not six blocks
    built = Mixed(shallow)  # authority: a model of just those blocks, copied, each of its kind
    built.scales = tuple(i + 1 for i in keep)
    for ours, i in zip(built.body.layers, keep):
        ours.load_state_dict(fine.body.layers[i].state_dict())
    assert torch.equal(coarse(x), built(x)) and coarse.config == shallow
    assert coarse.config is coarse.body.config.text_config
    assert torch.equal(fine(x), before) and fine.scales == (1, 2, 3, 4, 5, 6)
    assert fine.config is config is fine.body.config.text_config and config == as_it_was


def test_a_wrong_path_names_the_lists_that_there_are():
    model = nn.ModuleDict({"vit": Foreign(), "heads": nn.ModuleList([nn.Linear(2, 2)])})
    for path in ("vit.encoder.layer", "vit.body", ""):
        with pytest.raises(ValueError, match=f"{path!r} is not .* has: vit.body.layers, heads$"):
            restrict(model, [0], path)
    with pytest.raises(ValueError, match="has: none$"):  # nothing could hold the shorter list
        restrict(nn.ModuleList([nn.Linear(2, 2)]), [0], "")


@pytest.mark.parametrize("call, named", [
    (lambda m: coarse_sets(5), "5"), (lambda m: coarse_sets(5, "random"), "5"),
    (lambda m: coarse_sets(0), "0"), (lambda m: coarse_sets(4, "zigzag"), "zigzag"),
    (lambda m: coarse_sets(4, "stride", 5), "5"), (lambda m: restrict(m, [4]), "4"),
    (lambda m: restrict(m, [-1]), "-1"), (lambda m: prolong(m, [1, 1]), "[1, 1]"),
    (lambda m: restrict(m, []), "[]"), (lambda m: restrict(m, [0], "wte"), "wte"),
    (lambda m: restrict(m, [0], "no.such"), "no.such"), (lambda m: prolong(m, [0], 1.5), "1.5"),
    (lambda m: prolong(m, [0], math.nan), "nan"), (lambda m: prolong(m, [0], -0.1), "-0.1"),
    (lambda m: GPTConfig(n_embd=100), "100"),
    (lambda m: m(torch.zeros(1, 9, dtype=torch.int64)), "9")])
def test_wrong_input_is_a_value_error_that_names_it(call, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        call(small_gpt())


@pytest.mark.parametrize("last", [nn.Linear(2, 3), nn.Linear(2, 2, bias=False),
                                  nn.Linear(2, 2).double(), None])
def test_blocks_that_cannot_be_averaged_are_refused_and_nothing_changes(last):
    model, first = nn.Module(), nn.Linear(2, 2)
    model.blocks = nn.ModuleList([first, nn.Linear(2, 2), last or first])
    before = model.blocks[1].weight.clone()
    with pytest.raises(ValueError, match="0 and 2" if last else "more than once"):
        prolong(model, [0])
    assert torch.equal(model.blocks[1].weight, before)


def test_attention_written_out_for_the_cpu_equals_the_fused_kernel():
    q, k, v = torch.randn(3, 2, 4, 64, 32, dtype=torch.float64).bfloat16()
    exact = nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(),
                                                       is_causal=True)
    torch.testing.assert_close(attend(q, k, v).double(), exact, atol=0.02, rtol=0.02)


def test_generate():
    model, (x, _) = small_gpt(), batch()
    out = model.generate(x, 12, temperature=0)  # longer than the context
    assert out.shape == (3, 20) and torch.equal(out[:, :8], x)
    assert torch.equal(out[:, 8], model(x)[0][:, -1].argmax(-1))
    assert torch.equal(model.generate(x, 12, top_k=1), out)
