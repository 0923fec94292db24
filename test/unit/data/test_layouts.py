"""What a data path is taken for, and what is said about one that cannot be used."""

import os
import shutil

import pytest

from image_classification.config import DataConfig
from image_classification.data import detect_layout, open_datasets
from mmcls.utils.errors import RequestError


def problem_with(path, **options) -> str:
    """The one line that a user sees."""
    with pytest.raises(RequestError) as caught:
        detect_layout(str(path), **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_embedded_data_sets():
    digits, synthetic = detect_layout("digits"), detect_layout("synthetic")
    assert (digits.kind, digits.image_size, digits.num_classes, digits.small_images) == ("digits", 16, 10, True)
    assert (synthetic.kind, synthetic.image_size, synthetic.small_images) == ("synthetic", 224, False)


@pytest.mark.parametrize(
    "side, size, small", [(20, 24, True), (28, 32, True), (32, 32, True), (96, 96, True), (97, 224, False)]
)
def test_image_size_follows_the_pictures(tmp_path, make, side, size, small):
    layout = detect_layout(str(make.folder(tmp_path, train=(1, 1, 1), val=(1, 1, 1), size=(side, side + 9))))
    assert (layout.kind, layout.image_size, layout.small_images) == ("folder", size, small)
    assert layout.num_classes == 3 and layout.warnings == () and "3 classes" in layout.description


def test_hidden_names_change_no_label(tmp_path, make):
    make.folder(tmp_path)
    make.image(tmp_path / "train/.ipynb_checkpoints/x-checkpoint.JPEG")
    (tmp_path / "train/.DS_Store").touch()
    (tmp_path / "train/ant/._ant_0.JPEG").write_bytes(b"\0\5\x16\7")
    layout = detect_layout(str(tmp_path))
    assert layout.warnings == ("ignored names that begin with a dot: train/.DS_Store, train/.ipynb_checkpoints",)
    data = open_datasets(layout, DataConfig(), 8)
    assert data.class_names == ("ant", "bee", "cow") and len(data.train) == 24
    assert data.warnings == (f"ignored files whose names begin with a dot: {tmp_path}/train/ant/._ant_0.JPEG",)


def test_empty_class_is_refused_unless_allowed(tmp_path, make):
    make.folder(tmp_path)
    (tmp_path / "train/asp").mkdir()
    (tmp_path / "train/asp/notes.txt").touch()
    assert "train/ has no image in 1 of 4 class folders: asp; " in problem_with(tmp_path)
    assert "--allow_empty_classes" in problem_with(tmp_path)
    layout = detect_layout(str(tmp_path), allow_empty_classes=True)
    assert layout.num_classes == 4
    assert layout.warnings == ("train/ has no image in: asp", "val/ has no image in: asp")
    data = open_datasets(layout, DataConfig(allow_empty_classes=True), 8)
    assert data.class_names == ("ant", "asp", "bee", "cow")
    assert sorted({data.train[i][1] for i in range(len(data.train))}) == [0, 2, 3]


def test_class_without_validation_images_keeps_its_label(tmp_path, make):
    layout = detect_layout(str(make.folder(tmp_path, val=(4, 0, 3))))
    assert layout.warnings == ("val/ has no image in: bee",)
    val = open_datasets(layout, DataConfig(), 8).val
    assert [val[i][1] for i in range(len(val))] == [0] * 4 + [2] * 3


def test_validation_class_unknown_to_train(tmp_path, make):
    make.folder(tmp_path)
    make.image(tmp_path / "val/dog/dog.jpg")
    assert "val/ has class folders that train/ does not have: dog; " in problem_with(tmp_path)


def test_flat_validation_folder(tmp_path, make):
    make.folder(tmp_path, val=(0, 0, 0))
    for i in range(10):
        make.image(tmp_path / f"val/ILSVRC2012_val_{i:08d}.JPEG")
    expected = "val/ has 10 images but no class folders; sort them into val/<wnid>/ (see README"
    assert expected in problem_with(tmp_path)


def test_flat_training_folder(tmp_path, make):
    make.image(tmp_path / "train/a.jpg")
    make.image(tmp_path / "val/a.jpg")
    assert "train/ has 1 images but no class folders; " in problem_with(tmp_path)


def test_images_beside_the_class_folders_are_named(tmp_path, make):
    make.folder(tmp_path)
    make.image(tmp_path / "train/stray.jpg")
    assert detect_layout(str(tmp_path)).warnings == ("train/ has images outside its class folders, ignored: stray.jpg",)


def test_wrong_roots(tmp_path, make):
    root = make.folder(tmp_path / "many" / "good")
    for name in "abcdefg":
        (tmp_path / "many" / name).mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"12345")
    cases = {
        root / "train": f"found: ant, bee, cow; this is the train/ folder itself, give {root}",
        tmp_path / "many": f"found: a, b, c, d, e, ... (8 in all); for instance --data_path={root}",
        tmp_path / "nowhere": "found: no such file or folder",
        tmp_path / "empty": "found: nothing, it is empty",
        tmp_path / "file": "found: a file of 5 bytes",
    }
    for path, expected in cases.items():
        text = problem_with(path)
        assert text.startswith(f"--data_path={path}: expected train/ and val/") and expected in text


def test_folder_without_val(tmp_path, make):
    make.folder(tmp_path)
    shutil.rmtree(tmp_path / "val")
    assert "found: train; add val/" in problem_with(tmp_path)


def test_spellings_of_a_path(tmp_path, make, monkeypatch):
    root = make.folder(tmp_path / "my data (1) * $HOME 'é'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (f"{root}/", root.name, f"./{root.name}", f"~/{root.name}"):
        assert detect_layout(spelling).path == root
    os.rename(root, tmp_path / "~")
    assert detect_layout("~").path == tmp_path / "~"


def test_line_breaks_in_names_stay_out_of_the_message(tmp_path, make):
    make.folder(tmp_path)
    (tmp_path / "val" / "d\nog").mkdir()
    assert "does not have: d\\nog; " in problem_with(tmp_path)


def test_unreadable_folder(tmp_path, make, monkeypatch):
    root = make.folder(tmp_path)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    assert problem_with(root) == (f"--data_path={root}: cannot read {root}/train: Permission denied; make it readable")


def test_unreadable_pictures(tmp_path, make):
    make.folder(tmp_path, train=(1, 1, 1))
    for name in ("ant", "bee", "cow"):
        (tmp_path / f"train/{name}/{name}_0.JPEG").write_bytes(b"<html>")
    assert "none of the images tried can be read: " in problem_with(tmp_path)
    assert "ant_0.JPEG (not an image)" in problem_with(tmp_path)


@pytest.mark.parametrize("num_classes, version", [(10, "python"), (10, "binary"), (100, "python"), (100, "binary")])
def test_cifar_by_parent_and_by_folder(tmp_path, make, num_classes, version):
    folder = make.cifar(tmp_path, num_classes=num_classes, version=version)
    layouts = [detect_layout(str(path)) for path in (tmp_path, folder)]
    assert layouts[0] == layouts[1] and layouts[0].path == folder
    assert (layouts[0].kind, layouts[0].image_size) == (f"cifar{num_classes}", 32)
    assert layouts[0].num_classes == num_classes
    assert layouts[0].description == f"CIFAR-{num_classes}, {version} version, in {folder}"


def test_cifar_under_another_folder_name(tmp_path, make):
    folder = make.cifar(tmp_path).rename(tmp_path / "mine")
    assert detect_layout(str(folder)).kind == "cifar10"


def test_two_cifar_data_sets_are_ambiguous(tmp_path, make):
    make.cifar(tmp_path, version="python")
    make.cifar(tmp_path, version="binary")
    assert detect_layout(str(tmp_path)).path.name == "cifar-10-batches-py"
    make.cifar(tmp_path, num_classes=100)
    assert "holds cifar-10-batches-py and cifar-100-python; give the path of one" in problem_with(tmp_path)
