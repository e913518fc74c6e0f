"""Max-pooling with channels last, as engines do it on a CPU."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional

import coterie as ct
from coterie.engines import pooling
from coterie.engines.pooling import ChannelsLast


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        {"kernel_size": (3, 2), "stride": 1, "padding": 1},
        {"kernel_size": 2, "dilation": 2},
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("channels", [5, 32])
def test_the_same_pixels_are_the_largest(settings, stacked, channels):
    """Also where several are equal, which images with few shades have everywhere."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(4, (2, 3, channels, 8, 9), generator=g).float()
    x[0, 0, 0, 2, 2] = torch.nan

    def pooled(x):
        return functional.max_pool2d(x, **settings)

    weights = torch.randn(pooled(x[0]).shape, generator=g)

    def gradient(x):
        return grad(lambda x: (pooled(x) * weights).nan_to_num().sum())(x)

    for function in (pooled, gradient):
        plain = torch.stack([function(each) for each in x])
        with ChannelsLast():
            own = vmap(function)(x) if stacked else torch.stack([function(each) for each in x])
        assert torch.allclose(own, plain, equal_nan=True, rtol=0, atol=0 if function is pooled else 1e-6)


def test_single_images_indices_and_images_of_few_channels_are_as_ever():
    x = torch.randn(8, 4, 4)
    single, (values, at) = functional.max_pool2d(x, 2), nn.MaxPool2d(2, return_indices=True)(x[None])
    with ChannelsLast():
        assert torch.equal(functional.max_pool2d(x, 2), single)
        found = nn.MaxPool2d(2, return_indices=True)(x[None])
        few = functional.max_pool2d(x[None, :7].to(memory_format=torch.channels_last), 2)
    assert torch.equal(found[0], values) and torch.equal(found[1], at)
    assert few.is_contiguous(memory_format=torch.channels_last)  # as torch returned it


class Viewing(nn.Module):
    """Relies on the order of numbers in memory, as many modules do."""

    def __init__(self, channels_last=False):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 8, 2, padding=1), nn.Linear(32, 2)
        self.channels_last = channels_last

    def forward(self, x):
        x = self.convolution(x)
        if self.channels_last:
            last = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            return self.head(functional.max_pool2d(last, 2).permute(0, 2, 3, 1).view(x.size(0), -1))
        return self.head(functional.max_pool2d(x, 2).view(x.size(0), -1))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("executor", ["vectorised", "vmap", "sequential"])
def test_engines_pool_so_where_there_are_images(monkeypatch, executor, channels_last):
    seen = []
    plain = ChannelsLast.__torch_function__
    monkeypatch.setattr(
        pooling.ChannelsLast,
        "__torch_function__",
        lambda self, func, types, args=(), kwargs=None: (
            seen.append(func),
            plain(self, func, types, args, kwargs),
        )[1],
    )
    g = torch.Generator().manual_seed(0)
    images = [(torch.randn(5, 1, 4, 4, generator=g), torch.randint(2, (5,), generator=g)) for _ in range(3)]
    points = [(x.flatten(1), y) for x, y in images]
    net = Viewing(channels_last)
    ct.fit(ct.FedAvg(), ct.Task.classifier(net), ct.Federation.from_clients(images), rounds=1, executor=executor)
    assert any(func in pooling._POOLS for func in seen) == (executor != "sequential")
    seen.clear()
    ct.fit(ct.FedAvg(), ct.Task.classifier(nn.Linear(16, 2)), ct.Federation.from_clients(points), rounds=1)
    assert not seen
