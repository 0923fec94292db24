"""Small pictures of a folder that are decoded once, and what else happens to whole batches."""

import itertools

import numpy as np
import pytest
import torch

from image_classification.config import DataConfig
from image_classification.data import (
    ArrayDataset,
    EvalLoader,
    ImageReadError,
    TrainLoader,
    detect_layout,
    open_datasets,
)
from image_classification.data.resident import becomes_resident, stays_on_device

CPU = torch.device("cpu")
BOTH = ("auto", "device", "host")


@pytest.fixture
def files(tmp_path, make):
    """24 training and 10 validation pictures of 20x20, opened as 24x24."""
    return open_datasets(detect_layout(str(make.folder(tmp_path, size=(20, 20)))), DataConfig(), 24)


def common(rank=0, ranks=1):
    return {"rank": rank, "world_size": ranks, "device": CPU, "memory_format": torch.channels_last}


def train_loader(dataset, batch=24, seed=0, rank=0, ranks=1, **options):
    return TrainLoader(
        dataset,
        DataConfig(**{"workers": 0} | options),
        micro_batch_size=batch,
        micro_batches_per_epoch=len(dataset) // (batch * ranks),
        seed=seed,
        **common(rank, ranks),
    )


def joined(batches) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches)
    return torch.cat(images), torch.cat(labels)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("resident", BOTH)
@pytest.mark.parametrize("workers", [0, 1])
def test_unaugmented_images_are_those_that_are_read_each_time(files, resident, workers):
    resident_loader = train_loader(files.train, resident=resident, workers=workers)
    read_loader = train_loader(files.train, resident="off")
    assert same(joined(resident_loader.epoch(1, augment=False)), joined(read_loader.epoch(1, augment=False)))
    for rank in range(3):
        config = DataConfig(workers=workers, resident=resident)
        kept = EvalLoader(files.val, config, batch_size=3, **common(rank, 3))
        read = EvalLoader(files.val, DataConfig(workers=0, resident="off"), batch_size=3, **common(rank, 3))
        assert same(joined(kept), joined(read)) and len(kept) == len(read)


def test_no_file_is_read_after_the_first_time(files, monkeypatch):
    loader, val = train_loader(files.train), EvalLoader(files.val, DataConfig(workers=0), batch_size=4, **common())
    for path in (files.train.path(i) for i in range(len(files.train))):
        path.unlink()
    assert len(joined(loader.epoch(0))[1]) == len(joined(loader.epoch(1))[1]) == 24
    assert len(joined(val)[1]) == 10


def test_each_training_view_is_a_shifted_crop_and_mirror(files):
    """As the per-image views of the same pictures: one of the 7 x 7 shifts by up to an eighth, mirrored or not."""
    plain = joined(train_loader(files.train).epoch(0, augment=False))
    to_black = (-torch.tensor(files.train.mean) / torch.tensor(files.train.std)).view(1, 3, 1, 1)
    images, labels = joined(train_loader(files.train).epoch(0))
    assert torch.equal(labels, plain[1])
    padded = torch.nn.functional.pad(plain[0] - to_black, [3] * 4)
    seen = set()
    for place, image in enumerate(images - to_black):
        matches = [
            (top, left, mirrored)
            for top, left, mirrored in itertools.product(range(7), range(7), (False, True))
            if torch.allclose(
                padded[place, :, top : top + 24, left : left + 24].flip(-1 if mirrored else ()), image, atol=1e-5
            )
        ]
        assert len(matches) == 1
        seen.update(matches)
    assert len(seen) > 12


def statistics(loader, epochs) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each pixel and channel, and share of black border pixels in each row and column."""
    images = torch.cat([joined(loader.epoch(epoch))[0] for epoch in range(epochs)])
    black = (images == images.amin((0, 2, 3), keepdim=True)).all(1).double()
    return images.double().mean(0).numpy(), torch.cat([black.mean((0, 1)), black.mean((0, 2))]).numpy()


def test_statistics_equal_those_of_per_image_views(files):
    """960 views of each kind; a pixel's mean is known to about 0.035 deviations."""
    kept, kept_borders = statistics(train_loader(files.train), 40)
    read, read_borders = statistics(train_loader(files.train, resident="off", prefetch=0), 40)
    assert np.abs(kept - read).max() < 0.35 and np.abs((kept - read).mean()) < 0.01
    # The outermost columns are border in 3 of 7 shifts.
    assert np.abs(kept_borders - read_borders).max() < 0.08
    assert abs(kept_borders[0] - 3 / 7) < 0.08


def test_limit_in_bytes(files):
    need = 24 * 3 * 24 * 24
    assert becomes_resident(files.train, DataConfig(resident_bytes=need))
    assert not becomes_resident(files.train, DataConfig(resident_bytes=need - 1))
    assert all(becomes_resident(files.train, DataConfig(resident=where, resident_bytes=0)) for where in BOTH[1:])
    assert not becomes_resident(files.train, DataConfig(resident="off"))


def test_big_pictures_are_read_each_time(tmp_path, make):
    data = open_datasets(detect_layout(str(make.folder(tmp_path, size=(120, 110)))), DataConfig(), 224).train
    assert not any(becomes_resident(data, DataConfig(resident=where)) for where in (*BOTH, "off"))


def test_images_in_memory_go_to_the_device_if_they_fit():
    data = ArrayDataset(torch.zeros(10, 3, 2, 2, dtype=torch.uint8), torch.zeros(10).long(), 2, (0,) * 3, (1,) * 3)
    assert stays_on_device(data, DataConfig(resident_bytes=120)) and stays_on_device(
        data, DataConfig(resident="device")
    )
    for config in (DataConfig(resident_bytes=119), DataConfig(resident="host"), DataConfig(resident="off")):
        assert not stays_on_device(data, config)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_cannot_be_read_is_named(files, workers):
    path = files.train.path(13)
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(ImageReadError, match="cannot read image .*bee_5.JPEG .class bee, train.: truncated"):
        train_loader(files.train, workers=workers)


def blanked(loader, epoch, **options) -> torch.Tensor:
    return (joined(loader.epoch(epoch, **options))[0] == 0).all(1)


@pytest.mark.parametrize("resident", ["auto", "off"])
def test_cutout_blanks_a_square_of_each_image(files, resident):
    loader, without = (train_loader(files.train, resident=resident, cutout=side) for side in (6, 0))
    holes = blanked(loader, 2)
    sizes = holes.sum((1, 2))
    # A centre at the edge leaves a part of the square; inside it is whole.
    assert sizes.max() == 36 and sizes.min() >= 9
    images, labels = joined(loader.epoch(2))
    expected, expected_labels = joined(without.epoch(2))
    assert torch.equal(labels, expected_labels)
    assert torch.equal(images, expected.masked_fill(holes[:, None], 0)), "it changes no other draw"
    assert not torch.equal(holes, blanked(loader, 3))
    assert len({hole.numpy().tobytes() for hole in holes}) > 15
    assert not blanked(loader, 2, augment=False).any()


def test_cutout_belongs_to_the_image_not_to_its_place(files):
    whole = joined(train_loader(files.train, cutout=5).epoch(1))
    parts = [joined(train_loader(files.train, 4, rank=rank, ranks=2, cutout=5).epoch(1)) for rank in range(2)]
    known = {image.numpy().tobytes() for image in whole[0]}
    assert {image.numpy().tobytes() for part in parts for image in part[0]} == known
    rest = joined(train_loader(files.train, 4, cutout=5).epoch(1, first_micro_batch=3))
    assert torch.equal(rest[0], whole[0][12:])
