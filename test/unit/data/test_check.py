"""`--check_data`: every picture that cannot be read, every empty class, and the exit status."""

import os

import pytest

from image_classification.config import DataConfig
from image_classification.data import detect_layout
from image_classification.data.check import check_data
from mmcls.utils.errors import RequestError


def check(path, **options) -> tuple[list[str], str | None]:
    """The lines told, and the error."""
    lines = []
    try:
        check_data(detect_layout(str(path), True), DataConfig(workers=1, **options), lines.append)
    except RequestError as error:
        return lines, str(error)
    return lines, None


def test_a_whole_data_set_passes_with_its_counts(tmp_path, make):
    make.folder(tmp_path)
    assert check(tmp_path) == (
        ["checked 24 train images: 0 cannot be read", "checked 10 val images: 0 cannot be read"],
        None,
    )


def test_every_bad_picture_is_told_with_its_reason(tmp_path, make):
    make.folder(tmp_path, train=(150, 3, 3))
    whole = (tmp_path / "train/ant/ant_0.JPEG").read_bytes()
    bad = {
        "train/ant/ant_0.JPEG": (b"", "empty file"),
        "train/ant/ant_149.JPEG": (whole[: len(whole) // 2], "truncated"),
        "train/cow/cow_2.JPEG": (b"<html>", "not an image"),
        "val/bee/new\nline.png": (b"", "empty file"),
        f"val/bee/{os.fsdecode(bytes([255]))}.png": (b"", "empty file"),
    }
    for name, (content, _) in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "val/cow/link.jpg").symlink_to("gone.jpg")
    (tmp_path / "val/cow/.hidden.jpg").write_bytes(b"")
    lines, error = check(tmp_path)
    expected = []
    for name, (_, reason) in [*bad.items(), ("val/cow/link.jpg", (b"", "broken link"))]:
        split, class_name, _ = name.split("/")
        shown = name.replace("\n", "\\n").replace("\udcff", "\\udcff")
        expected.append(f"cannot read image {tmp_path}/{shown} (class {class_name}, {split}): {reason}")
    assert sorted(line for line in lines if line.startswith("cannot read")) == sorted(expected)
    assert lines[-2:] == ["checked 156 train images: 3 cannot be read", "checked 13 val images: 3 cannot be read"]
    assert f"ignored files whose names begin with a dot: {tmp_path}/val/cow/.hidden.jpg" in lines
    assert error.startswith(f"--data_path={tmp_path}: images that cannot be read: 6 of 169; replace or remove them")


def test_empty_classes_are_named_and_refused_unless_they_are_allowed(tmp_path, make):
    make.folder(tmp_path, train=(3, 0, 2), val=(1, 1, 0))
    (tmp_path / "train/bee").mkdir()
    (tmp_path / "val/cow").mkdir()
    lines, error = check(tmp_path)
    assert lines[-2:] == ["empty class: train/bee", "empty class: val/cow"]
    assert "classes of train/ without an image: 1; " in error and "--allow_empty_classes" in error
    assert check(tmp_path, allow_empty_classes=True) == (lines, None)


def test_several_processes_read_every_picture_once(tmp_path, make):
    make.folder(tmp_path, train=(140, 3, 3))
    (tmp_path / "train/ant/ant_139.JPEG").write_bytes(b"")
    lines = []
    with pytest.raises(RequestError, match="1 of 156"):
        check_data(detect_layout(str(tmp_path)), DataConfig(workers=2), lines.append)
    assert lines[-2:] == ["checked 146 train images: 1 cannot be read", "checked 10 val images: 0 cannot be read"]


def test_data_in_memory_is_read_as_a_whole(tmp_path, make):
    make.cifar(tmp_path)
    assert check(tmp_path)[0] == ["checked 30 train images: 0 cannot be read", "checked 6 val images: 0 cannot be read"]
    assert check("digits")[1] is None


def test_first_pictures_of_a_class_may_be_broken(tmp_path, make):
    make.folder(tmp_path)
    for name in ("ant", "bee", "cow"):
        for i in range(7):
            (tmp_path / f"train/{name}/{name}_{i}.JPEG").write_bytes(b"")
    assert detect_layout(str(tmp_path)).image_size == 40
    (tmp_path / "train/ant/ant_7.JPEG").write_bytes(b"")
    (tmp_path / "train/bee/bee_7.JPEG").write_bytes(b"")
    assert detect_layout(str(tmp_path)).image_size == 40
    (tmp_path / "train/cow/cow_7.JPEG").write_bytes(b"")
    with pytest.raises(RequestError, match="none of the images tried can be read: .*empty file"):
        detect_layout(str(tmp_path))
