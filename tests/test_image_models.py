"""Models for images: the papers' networks, and a small residual one."""

import pytest
import torch
from torch.nn import functional

import coterie as ct
from coterie.core.key import Key
from coterie.core.task import Trunk
from coterie.runs.config import build_task


@pytest.fixture(autouse=True)
def drawn_the_same():
    """Modules are drawn from the global generator."""
    torch.manual_seed(0)


def test_the_cifar_cnn_begins_as_tensorflows_tutorial_has_it():
    task = ct.Task.classifier(ct.models.CifarCNN())
    for model in (task.init(Key.of(0)), ct.models.CifarCNN().state_dict()):
        spreads = {
            "convolutions.0": 0.05, "convolutions.1": 0.05, "layers.0": 0.04, "layers.1": 0.04, "layers.2": 1 / 192,
        }  # fmt: skip
        for (name, spread), bias in zip(spreads.items(), (0, 0.1, 0.1, 0.1, 0), strict=True):
            weight = model[f"{name}.weight"]
            assert float(weight.abs().max()) <= 2 * spread * (1 + 1e-6)
            cut = 0.8796  # the deviation of a normal distribution that is cut off at two of its own
            assert (
                float(weight.std()) == pytest.approx(cut * spread, rel=0.05) and abs(float(weight.mean())) < spread / 20
            )
            assert torch.equal(model[f"{name}.bias"], torch.full_like(model[f"{name}.bias"], bias))
    assert not torch.equal(task.init(Key.of(0))["layers.0.weight"], task.init(Key.of(1))["layers.0.weight"])


def normed(x):
    """Each channel divided by (1 + 0.001/9 · the squares of the nine channels about it)^0.75."""
    c = x.shape[1]
    squares = [x[:, max(0, j - 4) : j + 5].square().sum(1) for j in range(c)]
    return x / (1 + 0.001 / 9 * torch.stack(squares, 1)) ** 0.75


def pooled(x):
    """The largest of windows of three that begin at every second place, the last of which are cut off."""
    rows = [
        [x[..., i : i + 3, j : j + 3].amax((-2, -1)) for j in range(0, x.shape[-1], 2)]
        for i in range(0, x.shape[-2], 2)
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def test_the_cifar_cnn_by_hand():
    net, x = ct.models.CifarCNN((3, 8, 8), 4, channels=12, hidden=(9, 7)), torch.randn(2, 3, 8, 8) * 30
    p = dict(net.named_parameters())
    z = functional.conv2d(x, p["convolutions.0.weight"], p["convolutions.0.bias"], padding=2).relu()
    z = normed(pooled(z))
    z = functional.conv2d(z, p["convolutions.1.weight"], p["convolutions.1.bias"], padding=2).relu()
    z = pooled(normed(z)).flatten(1)
    for i in range(3):
        z = z @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"]
        z = z.relu() if i < 2 else z
    assert torch.allclose(net(x), z, atol=1e-5)


def test_the_femnist_cnn_is_leafs():
    sizes = {name: tuple(p.shape) for name, p in ct.models.FemnistCNN().named_parameters() if name.endswith("weight")}
    assert list(sizes.values()) == [(32, 1, 5, 5), (64, 32, 5, 5), (2048, 3136), (62, 2048)]


def test_a_residual_network_by_hand():
    net, x = ct.models.ResNet(3, 5, width=8, blocks=2, groups=2), torch.randn(2, 3, 8, 8)
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in ct.models.ResNet(3, 10).modules()) == 7
    z = net.stem(x)
    for b in net.blocks:
        y = functional.group_norm(b.first(z), 2, b.first_norm.weight, b.first_norm.bias).relu()
        y = functional.group_norm(b.second(y), 2, b.second_norm.weight, b.second_norm.bias)
        z = functional.avg_pool2d((z + y).relu(), 2)
    assert torch.allclose(net(x), z.mean((2, 3)) @ net.head.weight.T + net.head.bias, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "frozen"),
    [
        (ct.models.CifarCNN((3, 8, 8), 4, channels=12, hidden=(9, 7)), "convolutions"),
        (ct.models.CifarCNN((3, 8, 8), 4, channels=12, hidden=(9, 7)), "convolutions.0"),
        (ct.models.FemnistCNN(5, 16), "convolutions"),
        (ct.models.ResNet(3, 5, width=8), "stem"),
    ],
)
def test_frozen_layers_in_front_are_a_trunk(module, frozen):
    module.get_submodule(frozen).requires_grad_(False)
    shape = (1, 28, 28) if isinstance(module, ct.models.FemnistCNN) else (3, 8, 8)
    assert isinstance(ct.Task.classifier(module).trunk(torch.randn(2, *shape)), Trunk)


@pytest.mark.parametrize("module", [ct.models.CifarCNN(classes=7), ct.models.FemnistCNN(5, 16), ct.models.ResNet(1, 3)])
def test_models_for_images_are_built_again_from_a_configuration(module):
    task = ct.Task.classifier(module)
    again = build_task(task.spec)
    first, second = task.init(Key.of(3)), again.init(Key.of(3))
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ct.models.CifarCNN((3, 26, 24)), "CifarCNN: height and width must be multiples of 4, got 26 and 24"),
        (lambda: ct.models.CifarCNN((3, 24)), "CifarCNN: shape must be channels, height and width, got [3, 24]"),
        (
            lambda: ct.models.FemnistCNN(hidden=0),
            "CNN: classes, hidden and channels must be at least 1, got 62, 0, (32, 64)",
        ),
        (lambda: ct.models.ResNet(0, 10), "ResNet: depth must be at least 1, got 0"),
        (lambda: ct.models.CifarCNN(hidden=(5,)), "CifarCNN: hidden must be the sizes of two layers, got [5]"),
        (
            lambda: ct.models.ResNet(3, 10, width=6),
            "ResNet: width must be a positive multiple of groups, got 6 and 4",
        ),
        (lambda: ct.models.ResNet(3, 10, blocks=0), "ResNet: blocks must be at least 1, got 0"),
    ],
)
def test_models_that_cannot_be(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


def test_an_image_that_is_too_small_for_a_residual_network_is_refused():
    federation = ct.Federation.from_clients([(torch.zeros(3, 3, 4, 4), torch.zeros(3, dtype=torch.long))])
    with pytest.raises(ValueError, match=r"client 0: ResNet does not take rows of shape \(3, 4, 4\)"):
        ct.fit(ct.FedAvg(), ct.Task.classifier(ct.models.ResNet(3, 2)), federation, rounds=1)
