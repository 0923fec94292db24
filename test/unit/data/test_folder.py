"""Pictures of any mode and format from class folders, and the names of those that cannot be read."""

import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from image_classification.data import FolderDataset, ImageReadError
from image_classification.data.decode import read_rgb

MODES = [
    ("RGB", "JPEG"),
    ("L", "JPEG"),
    ("CMYK", "JPEG"),
    ("RGB", "PNG"),
    ("RGBA", "PNG"),
    ("LA", "PNG"),
    ("P", "PNG"),
    ("1", "PNG"),
    ("P", "GIF"),
    ("RGB", "WEBP"),
    ("RGB", "TIFF"),
    ("RGB", "BMP"),
    ("RGB", "PPM"),
]


def dataset(root, split="train", size=32, small=True):
    ones = (1.0, 1.0, 1.0)
    return FolderDataset(root, split, ("ant", "bee", "cow"), image_size=size, small_images=small, mean=ones, std=ones)


@pytest.mark.parametrize("mode, image_format", MODES)
def test_every_mode_gives_pillows_rgb(tmp_path, make, mode, image_format):
    # The ending says JPEG whatever the content is.
    make.image(tmp_path / "x.JPEG", mode=mode, image_format=image_format)
    ours = np.asarray(read_rgb(tmp_path / "x.JPEG"))
    assert ours.shape == (48, 40, 3)
    assert np.array_equal(ours, np.asarray(Image.open(tmp_path / "x.JPEG").convert("RGB")))


def test_palette_with_several_transparent_colours_warns_nobody(tmp_path, make):
    make.image(tmp_path / "x.png", mode="P", image_format="PNG")
    with Image.open(tmp_path / "x.png") as image:
        image.save(tmp_path / "t.png", transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(np.asarray(read_rgb(tmp_path / "t.png")), np.asarray(read_rgb(tmp_path / "x.png")))


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_keeps_its_contrast(tmp_path, image_format):
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "x.png", image_format)
    ours = np.asarray(read_rgb(tmp_path / "x.png"))
    assert np.array_equal(ours, np.repeat((grey // 257).astype(np.uint8)[:, :, None], 3, axis=2))


def test_endings_in_any_case_and_in_deeper_folders(tmp_path, make):
    names = ["a.JPG", "b.jpeg", "c.Png", "d.bmp", "e.webp", "f.GIF", "g.tif", "h.TIFF", "i.ppm", "images/j.jpg"]
    for name in [*names, "not.txt", "jpg", ".hidden.jpg", ".folder/k.jpg"]:
        make.image(tmp_path / "train/bee" / name)
    data = dataset(tmp_path)
    assert [str(data.path(i).relative_to(tmp_path / "train/bee")) for i in range(len(data))] == names
    assert {data[i][1] for i in range(len(data))} == {1}
    assert sorted(path.rsplit("/", 1)[1] for path in data.hidden) == [".folder", ".hidden.jpg"]


def test_names_of_any_kind(tmp_path, make):
    not_utf8 = os.fsdecode(b"\xff latin.jpg")
    names = [" leading and trailing .png", "图片一.jpg", "new\nline.jpg", not_utf8]
    for name in names:
        make.image(tmp_path / "train/cow" / name)
    data = dataset(tmp_path)
    assert {data.path(i).name for i in range(len(data))} == set(names)
    assert all(data[i][0].shape == (3, 32, 32) for i in range(len(data)))


def test_order_is_by_class_and_name(tmp_path, make):
    make.folder(tmp_path, train=(2, 11, 1))
    data = dataset(tmp_path)
    paths = [str(data.path(i)) for i in range(len(data))]
    assert paths == sorted(paths) and len(paths) == 14
    assert [data[i][1] for i in range(14)] == [0] * 2 + [1] * 11 + [2]


@pytest.mark.parametrize("small", [True, False])
def test_items_and_training_views(tmp_path, make, small):
    data = dataset(make.folder(tmp_path), size=24, small=small)
    image, label = data[9]
    assert image.dtype == torch.uint8 and image.shape == (3, 24, 24) and label == 1
    assert torch.equal(image, data[9][0])
    view, label = data.training_view(9, seed=0, epoch=0)
    assert view.dtype == torch.uint8 and view.shape == (3, 24, 24) and label == 1
    assert torch.equal(view, data.training_view(9, seed=0, epoch=0)[0])
    assert not torch.equal(view, data.training_view(9, seed=0, epoch=1)[0])
    assert not torch.equal(view, data.training_view(9, seed=1, epoch=0)[0])


@pytest.mark.parametrize(
    "content, reason",
    [
        (lambda whole: whole[: len(whole) // 2], "truncated"),
        (lambda whole: b"", "empty file"),
        (lambda whole: b"<html>404</html>", "not an image"),
    ],
)
def test_unreadable_picture_is_named(tmp_path, make, content, reason):
    make.folder(tmp_path)
    path = tmp_path / "val/bee/bee_1.JPEG"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ImageReadError) as caught:
        dataset(tmp_path, "val")[5]
    assert str(caught.value) == f"cannot read image {path} (class bee, val): {reason}"
    assert isinstance(caught.value, RuntimeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_broken_and_unreadable_links(tmp_path, make):
    make.folder(tmp_path, train=(0, 0, 0))
    folder = tmp_path / "train/ant"
    folder.mkdir(parents=True)
    (folder / "a.jpg").symlink_to(tmp_path / "gone.jpg")
    (folder / "b.jpg").symlink_to(folder / "b.jpg")
    data = dataset(tmp_path)
    with pytest.raises(ImageReadError, match=r"a.jpg \(class ant, train\): broken link"):
        data[0]
    with pytest.raises(ImageReadError, match=r"b.jpg \(class ant, train\): Too many levels of symbolic links"):
        data[1]


def test_file_removed_during_the_run(tmp_path, make):
    data = dataset(make.folder(tmp_path))
    data.path(0).unlink()
    with pytest.raises(ImageReadError, match="no such file"):
        data[0]
