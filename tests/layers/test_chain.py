"""A chain is a sequence of modules in names and results."""

import torch
from torch import nn

from torchcaps.layers.chain import Chain


def layers():
    torch.manual_seed(1)
    convs = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    return [*convs, nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.0), nn.Linear(5, 6), nn.Sigmoid()]


def test_a_chain_does_what_its_modules_do_one_after_another():
    x = torch.randn(3, 2, 5, 5)
    chain, plain = Chain(*layers()), nn.Sequential(*layers())
    assert torch.equal(chain(x), plain(x))
    assert list(chain.state_dict()) == list(plain.state_dict())
    assert all(map(torch.equal, chain.state_dict().values(), plain.state_dict().values()))


def test_a_chain_compiles_in_one_piece():
    x = torch.randn(3, 2, 5, 5)
    chain = Chain(*layers())
    expected = Chain(*layers())(x)
    assert torch.equal(torch.compile(chain, backend="eager", fullgraph=True)(x), expected)
