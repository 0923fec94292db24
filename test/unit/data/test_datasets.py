"""The data sets that need no files, and the statistics that go with each kind."""

import pytest
import torch
from sklearn.datasets import load_digits

from image_classification.config import DataConfig
from image_classification.data import detect_layout, open_datasets


def test_digits_are_split_by_class_and_the_same_each_time():
    one, other = (open_datasets(detect_layout("digits"), DataConfig(), 16) for _ in range(2))
    assert (len(one.train), len(one.val)) == (1437, 360)
    assert one.train.images.shape == (1437, 3, 16, 16) and one.train.images.dtype == torch.uint8
    assert torch.equal(one.train.images, other.train.images) and torch.equal(one.val.labels, other.val.labels)
    counts = [torch.bincount(part.labels, minlength=10) for part in (one.train, one.val)]
    shares = counts[1] / (counts[0] + counts[1])
    assert ((shares - 360 / 1797).abs() < 0.005).all()
    assert one.class_names == tuple("0123456789") and one.num_classes == 10


def test_digits_are_scikit_learns_images():
    data = open_datasets(detect_layout("digits"), DataConfig(), 8)
    theirs = torch.from_numpy(load_digits().images * (255 / 16)).round().to(torch.uint8)
    ours = torch.cat([data.train.images, data.val.images])
    assert torch.equal(ours[:, 0], ours[:, 1]) and torch.equal(ours[:, 0], ours[:, 2])
    assert sorted(i.numpy().tobytes() for i in ours[:, 0]) == sorted(i.numpy().tobytes() for i in theirs)


def test_digits_are_shifted_but_never_mirrored():
    data = open_datasets(detect_layout("digits"), DataConfig(), 16)
    assert (data.train.pad, data.train.flip) == (2, False) and (data.val.pad, data.val.flip) == (0, False)


def test_digits_normalise_to_zero_mean_and_unit_deviation():
    train = open_datasets(detect_layout("digits"), DataConfig(), 8).train
    pixels = train.images.double() / 255
    assert abs(pixels.mean() - train.mean[0]) < 0.002 and abs(pixels.std() - train.std[0]) < 0.002


def test_synthetic():
    data = open_datasets(detect_layout("synthetic"), DataConfig(synthetic_images=22), 8)
    assert (len(data.train), len(data.val), data.num_classes) == (22, 5, 1000)
    assert data.train.images.shape == (22, 3, 8, 8)
    assert not torch.equal(data.train.images[:5], data.val.images)
    assert (data.train.pad, data.train.flip) == (0, False)


@pytest.mark.parametrize("num_classes, mean", [(10, 0.4914), (100, 0.5071)])
def test_cifar_is_cropped_mirrored_and_normalised(tmp_path, make, num_classes, mean):
    make.cifar(tmp_path, num_classes=num_classes)
    data = open_datasets(detect_layout(str(tmp_path)), DataConfig(), 64)
    assert (data.train.pad, data.train.flip) == (4, True) and (data.val.pad, data.val.flip) == (0, False)
    assert data.train.mean[0] == data.val.mean[0] == mean
    assert data.train.images.shape[2:] == (32, 32) and data.train.image_size == 64


def test_folders_are_normalised_as_imagenet(tmp_path, make):
    data = open_datasets(detect_layout(str(make.folder(tmp_path))), DataConfig(), 40)
    assert data.train.mean == (0.485, 0.456, 0.406) and data.val.std == (0.229, 0.224, 0.225)
    assert data.train.small_images and data.train.image_size == data.val.image_size == 40
