"""Class folders: which files are pictures, their order, and the names of those that cannot be read."""

import os
import pickle

import numpy as np
import pytest
from PIL import Image

from image_classification.data import FolderDataset, ImageReadError


def dataset(root, split="train", size=32, small=True, **options):
    ones = (1.0, 1.0, 1.0)
    return FolderDataset(
        root, split, ("ant", "bee", "cow"), image_size=size, small_images=small, mean=ones, std=ones, **options
    )


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
    assert all(data[i][0].shape == (32, 32, 3) for i in range(len(data)))


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
    assert image.dtype == np.uint8 and image.shape == (24, 24, 3) and label == 1
    assert np.array_equal(image, data[9][0])
    view, label = data.training_view(9, seed=0, epoch=0)
    assert view.dtype == np.uint8 and view.shape == (24, 24, 3) and label == 1
    assert np.array_equal(view, data.training_view(9, seed=0, epoch=0)[0])
    assert not np.array_equal(view, data.training_view(9, seed=0, epoch=1)[0])
    assert not np.array_equal(view, data.training_view(9, seed=1, epoch=0)[0])


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


def test_special_files_are_not_opened(tmp_path, make):
    make.folder(tmp_path, train=(2, 1, 1))
    os.mkfifo(tmp_path / "train/ant/pipe.jpg")  # opening it would wait for a writer
    assert len(dataset(tmp_path)) == 4


def test_pictures_are_turned_only_where_it_is_asked(tmp_path, make):
    make.folder(tmp_path, train=(0, 0, 1), size=(64, 32))
    path = tmp_path / "train/cow/cow_0.JPEG"
    with Image.open(path) as image:
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(path, exif=exif)
    stored, turned = dataset(tmp_path), dataset(tmp_path, exif_rotation=True)
    assert stored.pixels(0).shape == (32, 64, 3) and turned.pixels(0).shape == (64, 32, 3)
    assert np.array_equal(np.rot90(stored[0][0], -1), turned[0][0])


def break_some(data):
    """Of 24 pictures, number 5 and those from 16 on cannot be read."""
    for index in (5, *range(16, 24)):
        data.path(index).write_bytes(b"")
    return data


@pytest.fixture
def partly_broken(tmp_path, make):
    return break_some(dataset(make.folder(tmp_path), skip_bad=True))


@pytest.mark.parametrize("epoch", [2, None])
def test_another_picture_takes_the_place_of_one_that_cannot_be_read(partly_broken, epoch):
    for index in range(24):
        (view, label), errors = partly_broken.sample(index, 3, epoch)
        (same_view, same_label), same_errors = partly_broken.sample(index, 3, epoch)
        assert np.array_equal(view, same_view) and label == same_label
        assert [error.path for error in errors] == [error.path for error in same_errors]
        assert bool(errors) == (index == 5 or index >= 16)
        if errors:
            assert errors[0].path == str(partly_broken.path(index)) and errors[0].reason == "empty file"
        else:
            own = partly_broken[index] if epoch is None else partly_broken.training_view(index, 3, epoch)
            assert np.array_equal(view, own[0]) and label == own[1]


def test_replacements_come_from_the_whole_split_and_change_with_the_epoch(partly_broken):
    labels = [partly_broken.sample(5, 0, epoch)[0][1] for epoch in range(60)]
    # 15 pictures can be read: 7 of class 0 and 8 of class 1.
    assert 18 <= sum(label == 0 for label in labels) <= 38 and set(labels) == {0, 1}


def test_a_data_set_of_which_nothing_can_be_read_is_an_error(partly_broken):
    for index in range(24):
        partly_broken.path(index).unlink(missing_ok=True)
    with pytest.raises(ImageReadError, match="ant_5.JPEG .*no such file"):
        partly_broken.sample(5, 0, 0)


def test_pictures_of_validation_are_left_out_not_replaced(tmp_path, make):
    data = break_some(dataset(make.folder(tmp_path, val=(8, 8, 8)), "val", skip_bad=True))
    assert [index for index in range(24) if data.sample(index, 0, None)[0] is None] == [5, *range(16, 24)]


@pytest.mark.parametrize("split, epoch", [("train", 0), ("train", None), ("val", None)])
def test_unless_they_are_skipped_bad_pictures_are_errors(tmp_path, make, split, epoch):
    data = break_some(dataset(make.folder(tmp_path, val=(8, 8, 8)), split))
    with pytest.raises(ImageReadError, match="ant_5.JPEG"):
        data.sample(5, 0, epoch)


def test_file_removed_during_the_run(tmp_path, make):
    data = dataset(make.folder(tmp_path))
    data.path(0).unlink()
    with pytest.raises(ImageReadError, match="no such file"):
        data[0]
