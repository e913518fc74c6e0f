"""Random crops and flips in training: where they are, that they are the same everywhere, and what is scored."""

import pytest
import torch
from torch import nn
from torch.func import vmap

import coterie as ct
from coterie.core.augment import CropFlip
from coterie.core.key import Key
from coterie.core.task import Data
from coterie.runs.config import build_task

EXECUTORS = ("sequential", "vmap", "vectorised")
SIZES = (5, 7, 6, 9, 4)


def images(n, side=6, depth=2):
    """Every pixel is different."""
    return torch.arange(float(n * depth * side * side)).reshape(n, depth, side, side)


def places(x, crops, size):
    """Where each crop lies in its image: (top, left, whether it is mirrored)."""
    found = []
    for image, crop in zip(x, crops, strict=True):
        for mirrored in (False, True):
            upright = crop.flip(-1) if mirrored else crop
            corner = (image[0] == upright[0, 0, 0]).nonzero()
            if not len(corner):
                continue
            top, left = corner[0].tolist()
            if torch.equal(image[:, top : top + size, left : left + size], upright):
                found.append((top, left, mirrored))
    assert len(found) == len(x)  # each is a window of its image, in one way
    return found


def test_each_image_of_a_batch_has_a_crop_of_its_own():
    x = images(400)
    own = CropFlip(4)
    found = places(x, own.random(x, torch.tensor(5)), 4)
    assert {(top, left) for top, left, _ in found} == {(i, j) for i in range(3) for j in range(3)}
    assert 150 < sum(mirrored for *_, mirrored in found) < 250
    for kind in range(2):  # neither axis has a favourite, nor do the two go together
        assert min(sum(place[kind] == i for place in found) for i in range(3)) > 100
    assert max(sum(place == other for place in found) for other in set(found)) < 50
    assert not any(mirrored for *_, mirrored in places(x, CropFlip(4, flip=False).random(x, torch.tensor(5)), 4))


def test_equal_seeds_give_equal_crops_whatever_the_padding():
    x, own = images(20), CropFlip(4, pad=1)
    first = own.random(x, torch.tensor(7))
    assert torch.equal(first, own.random(x, torch.tensor(7)))
    assert torch.equal(first[:5], own.random(x[:5], torch.tensor(7)))
    assert not torch.equal(first, own.random(x, torch.tensor(8)))
    seeds = torch.tensor([7, 8, 9])
    together = vmap(own.random, in_dims=(None, 0))(x, seeds)
    assert torch.equal(together, torch.stack([own.random(x, seed) for seed in seeds]))


def test_the_centre_is_that_of_the_image_with_its_border():
    x = images(3)
    assert torch.equal(CropFlip(6, pad=2).centre(x), x) and torch.equal(CropFlip(4).centre(x), x[..., 1:5, 1:5])
    assert torch.equal(CropFlip(3).centre(x), x[..., 1:4, 1:4])  # of two middles the first
    whole = CropFlip(10, pad=2, flip=False)
    assert torch.equal(whole.centre(x), whole.random(x, torch.tensor(0))) and float(whole.centre(x)[0, 0, 1].sum()) == 0


def federation(shape=(2, 6, 6), classes=3):
    g = torch.Generator().manual_seed(0)
    return ct.Federation.from_clients(
        [(torch.randn(n, *shape, generator=g), torch.randint(classes, (n,), generator=g)) for n in SIZES]
    )


def small(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def same(a, b, **near):
    return all(torch.allclose(x[n], y[n], **near) for x, y in zip(a.models, b.models, strict=True) for n in x)


METHODS = {
    "batches": ct.IFCA(k=2, lr=0.05, tau=3, batch=4, init="random"),
    "epochs": ct.IFCA(k=2, lr=0.05, epochs=2, batch=2, init="random", restarts=2),
    "all rows": ct.FedAvg(lr=0.05, tau=3),
    "gradients": ct.IFCA(k=2, lr=0.05, average="gradient", init="random"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("middle", [(), (nn.Dropout(0.5),), (nn.BatchNorm2d(4),)], ids=["plain", "dropout", "norm"])
def test_crops_are_the_same_on_every_executor(name, middle):
    if name == "gradients" and isinstance(middle[0] if middle else None, nn.BatchNorm2d):
        middle = (nn.GroupNorm(2, 4),)  # BatchNorm does not go with gradients
    task = ct.Task.classifier(small(*middle), augment=CropFlip(4))
    runs = [ct.fit(METHODS[name], task, federation(), rounds=3, executor=e) for e in EXECUTORS]
    for run in runs[1:]:
        assert same(runs[0], run, atol=2e-5) and run.labels.tolist() == runs[0].labels.tolist()
    plain = ct.fit(
        METHODS[name], ct.Task.classifier(small(*middle), augment=CropFlip(4)), federation(), rounds=3, seed=1
    )
    assert not same(runs[0], plain, atol=1e-4)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_model_that_begins_with_a_linear_layer_is_trained_on_crops_too(executor):
    method, own = ct.FedAvg(lr=0.1, tau=2), federation()
    task = ct.Task.classifier(ct.models.MLP(2 * 16, 3), augment=CropFlip(4))
    run = ct.fit(method, task, own, rounds=2, executor=executor)
    assert same(run, ct.fit(method, task, own, rounds=2, executor="sequential"), atol=1e-6)
    still = ct.Task.classifier(ct.models.MLP(2 * 16, 3), augment=CropFlip(4, flip=False))
    centres = own.map(lambda i, x, y: (CropFlip(4).centre(x), y))
    bare = ct.fit(method, ct.Task.classifier(ct.models.MLP(2 * 16, 3)), centres, rounds=2, executor=executor)
    assert not same(run, bare, atol=1e-3)
    assert not same(run, ct.fit(method, still, own, rounds=2, executor=executor), atol=1e-3)


def test_the_loss_in_training_is_that_of_the_crops():
    module = small()
    task = ct.Task.classifier(module, init="module", augment=CropFlip(4))
    x, y = federation().train.client(1)
    rows, theta = Data(x, y, torch.ones(len(x))), task.init(Key.of(0))
    assert task.check(rows) is None and task.draws
    for seed in (torch.tensor(3), torch.tensor(4)):
        each, moved = task.train(theta, rows, seed)
        loss = nn.functional.cross_entropy(module(CropFlip(4).random(x, seed)), y, reduction="none")
        assert torch.allclose(each, loss, atol=1e-6) and not moved
        assert not torch.allclose(each, task.loss(theta, rows), atol=1e-3)


def test_every_client_round_and_step_has_crops_of_its_own(monkeypatch):
    seeds, random = [], CropFlip.random
    monkeypatch.setattr(CropFlip, "random", lambda own, x, seed: seeds.append(int(seed)) or random(own, x, seed))
    task = ct.Task.classifier(small(), augment=CropFlip(4))

    def used(**more):
        seeds.clear()
        ct.fit(ct.FedAvg(tau=3), task, federation(), rounds=2, executor="sequential", **more)
        return list(seeds)

    first = used()
    assert len(set(first)) == len(first) == 2 * len(SIZES) * 3
    assert used() == first and not set(used(seed=1)) & set(first)


def test_scores_choices_and_predictions_are_of_the_centre():
    own = federation()
    task = ct.Task.classifier(small(), augment=CropFlip(4))
    run = ct.fit(METHODS["batches"], task, own, rounds=2)
    first, second = (run.module(j) for j in range(2))
    for i in range(len(own)):
        x, y = own.train.client(i)
        outs = [net(CropFlip(4).centre(x)).detach() for net in (first, second)]
        losses = [float(nn.functional.cross_entropy(out, y)) for out in outs]
        label = int(run.labels[i])
        assert losses[label] == min(losses) and run.assign(x, y) == label
        assert float(run.scores.loss[i]) == pytest.approx(losses[label], abs=1e-5)
        assert run.predict(x, client=i).tolist() == outs[label].argmax(1).tolist()
    assert (run.evaluate().loss == run.evaluate().loss).all()


def test_crops_of_the_whole_image_change_nothing():
    bare = ct.fit(METHODS["batches"], ct.Task.classifier(small()), federation((2, 4, 4)), rounds=2)
    whole = ct.Task.classifier(small(), augment=CropFlip(4, flip=False))
    assert same(bare, ct.fit(METHODS["batches"], whole, federation((2, 4, 4)), rounds=2), atol=1e-6)


def test_a_loss_of_the_users_has_crops_too():
    loss = nn.CrossEntropyLoss(reduction="none")
    task = ct.Task.from_module(small(), loss, augment=CropFlip(4))
    run = ct.fit(METHODS["batches"], task, federation(), rounds=2)
    assert same(
        run, ct.fit(METHODS["batches"], ct.Task.classifier(small(), augment=CropFlip(4)), federation(), rounds=2)
    )


def test_an_augmentation_is_written_to_and_read_from_configurations(tmp_path):
    task = ct.Task.classifier(ct.models.ResNet(1, 10, width=4, blocks=1), augment=CropFlip(8, pad=2))
    assert task.spec["augment"] == {"name": "crop_flip", "size": 8, "pad": 2, "flip": True}
    assert build_task(task.spec).functions.augment == CropFlip(8, pad=2)
    method, digits = ct.FedAvg(tau=2, batch=8), ct.data.digits(4)
    run = ct.fit(method, task, digits, rounds=2, out=tmp_path / "run")
    again = ct.load(tmp_path / "run")
    assert again.predict(digits.test.x[:9]).tolist() == run.predict(digits.test.x[:9]).tolist()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"augment": {"name": "crop"}}, "[task.augment] 'crop' is not known"),
        ({"augment": {"name": "crop_flip"}}, "[task.augment] needs size"),
        ({"augment": {"name": "crop_flip", "size": 0}}, "CropFlip: size must be at least 1, got 0"),
        ({"augment": {"name": "crop_flip", "size": 4, "flip": 1}}, "CropFlip: flip must be true or false, got 1"),
        (
            {"augment": {"name": "crop_flip", "size": 4}, "kind": "regressor"},
            "augment goes with classifier, not with",
        ),
    ],
)
def test_augmentations_in_a_configuration_that_cannot_be(table, message):
    with pytest.raises(ValueError) as error:
        build_task({"model": {"name": "mlp", "sizes": [4, 2]}, **table})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("augment", "shape", "message"),
    [
        (
            CropFlip(4),
            (36,),
            "MLP does not take rows of shape (36,) and type torch.float32 (CropFlip takes images",
        ),
        (CropFlip(9), (1, 6, 6), "(CropFlip: size 9 is more than images of 6 × 6 with pad 0)"),
        (CropFlip(5), (1, 6, 6), "client 0: MLP does not take rows of shape (1, 6, 6)"),
    ],
)
def test_images_that_cannot_be_cropped_are_refused(augment, shape, message):
    with pytest.raises(ValueError) as error:
        ct.fit(ct.FedAvg(), ct.Task.classifier(ct.models.MLP(16, 3), augment=augment), federation(shape), rounds=1)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_does_not_go_with_crops_is_refused():
    with pytest.raises(ValueError, match="CropFlip: size must be at least 1, got 0"):
        ct.Task.classifier(small(), augment=CropFlip(0))
    with pytest.raises(ValueError, match="Task: augment must be CropFlip or None, got 'crop_flip'"):
        ct.Task.classifier(small(), augment="crop_flip")
    pair = [((torch.zeros(3, 2), torch.zeros(3, 1)), torch.zeros(3, dtype=torch.long))]
    task = ct.Task.classifier(nn.Bilinear(2, 1, 2), augment=CropFlip(2))
    with pytest.raises(ValueError, match="augment takes rows that are one image, but these are several inputs"):
        ct.fit(ct.FedAvg(), task, ct.Federation.from_clients(pair), rounds=1)
    linear = ct.Task.classifier(ct.models.Linear(32, 3), augment=CropFlip(4))
    with pytest.raises(ValueError, match="MixedEffects"):
        ct.fit(ct.MixedEffects(k=1), linear, federation(), rounds=1)
