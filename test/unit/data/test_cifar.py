"""Reading CIFAR's files, and refusing what is cut off, wrong or hostile."""

import os
import pickle

import numpy as np
import pytest
import torch

from image_classification.config import DataConfig
from image_classification.data import detect_layout, open_datasets
from mmcls.utils.errors import RequestError


def open_cifar(path, image_size=32):
    return open_datasets(detect_layout(str(path)), DataConfig(), image_size)


def problem_with(path) -> str:
    with pytest.raises(RequestError) as caught:
        detect_layout(str(path))
    return str(caught.value)


@pytest.mark.parametrize("num_classes", [10, 100])
def test_both_versions_hold_the_same_images(tmp_path, make, num_classes):
    python = open_cifar(make.cifar(tmp_path / "a", num_classes=num_classes))
    binary = open_cifar(make.cifar(tmp_path / "b", num_classes=num_classes, version="binary"))
    count = 30 if num_classes == 10 else 6
    assert python.train.images.shape == (count, 3, 32, 32) and python.train.images.dtype == torch.uint8
    assert python.train.labels.dtype == torch.int64 and len(python.val) == 6
    for split in ("train", "val"):
        ours, other = getattr(python, split), getattr(binary, split)
        assert torch.equal(ours.images, other.images) and torch.equal(ours.labels, other.labels)
    assert python.num_classes == binary.num_classes == num_classes
    assert python.class_names[:2] == ("class 0", "class 1")
    assert binary.class_names[:2] == ("0", "1"), "there is no list of names"


def test_images_and_labels_are_those_of_the_file(tmp_path, make):
    folder = make.cifar(tmp_path)
    data = open_cifar(folder)
    with (folder / "data_batch_2").open("rb") as file:
        batch = pickle.load(file)
    assert data.train.images[6:12].flatten().tolist() == batch[b"data"].flatten().tolist()
    assert data.train.labels[6:12].tolist() == batch[b"labels"]


@pytest.mark.parametrize("key", [str, str.encode])
@pytest.mark.parametrize("protocol", range(6))
def test_text_and_bytes_keys_in_every_protocol(tmp_path, make, key, protocol):
    data = open_cifar(make.cifar(tmp_path, key=key, protocol=protocol))
    assert len(data.train) == 30 and data.class_names[9] == "class 9"


def test_pickle_of_python_2(tmp_path, make):
    """Python 2 writes keys and pixels as 8-bit strings, and arrays by numpy's old module names."""
    folder = make.cifar(tmp_path, images_per_file=1)
    pixels = bytes(range(256)) * 12
    labels = b"U\x06labels(lK\x03a"
    array = (
        b"U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
        b"(I1\n(I1\nI3072\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\n"
        b"T\x00\x0c\x00\x00" + pixels + b"tb"
    )
    (folder / "test_batch").write_bytes(b"\x80\x02}(" + labels + array + b"u.")
    val = open_cifar(folder).val
    assert val.labels.tolist() == [3]
    assert val.images.numpy().tobytes() == pixels


class RunsACommand:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_hostile_pickle_is_refused_and_not_run(tmp_path, make):
    folder = make.cifar(tmp_path)
    trace = tmp_path / "was_here"
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": RunsACommand(f"touch {trace}")}, 2))
    text = problem_with(folder)
    assert text.startswith(f"--data_path={folder}/data_batch_3: ") and "posix.system, which was not run" in text
    assert not trace.exists()


def test_codecs_serve_for_latin1_alone(tmp_path, make):
    folder = make.cifar(tmp_path)
    (folder / "data_batch_1").write_bytes(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.")
    assert "it holds text in rot13" in problem_with(folder)


def test_missing_file(tmp_path, make):
    folder = make.cifar(tmp_path)
    (folder / "data_batch_3").unlink()
    text = problem_with(tmp_path)
    assert text.startswith(f"--data_path={folder}: CIFAR-10, python version, is incomplete: data_batch_3 missing: ")
    assert "0 bytes found, over 30,720,000 expected" in text


def test_incomplete_folder_beside_its_archive(tmp_path, make):
    archive = make.archive(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert problem_with(tmp_path).endswith(f"; remove this folder, so that {archive} is unpacked again")


@pytest.mark.parametrize(
    "version, name, published",
    [("python", "test_batch", "over 30,720,000"), ("binary", "data_batch_5.bin", "30,730,000")],
)
def test_cut_off_file(tmp_path, make, version, name, published):
    folder = make.cifar(tmp_path, version=version)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:9000])
    expected = f"{name} is cut off: 9,000 bytes found, the published file has {published}; "
    assert expected in problem_with(folder)


def test_binary_file_cut_between_two_images(tmp_path, make):
    folder = make.cifar(tmp_path, version="binary")
    content = (folder / "data_batch_2.bin").read_bytes()
    (folder / "data_batch_2.bin").write_bytes(content[: len(content) // 2])
    expected = "data_batch_2.bin has 3 images, data_batch_1.bin has 6: is it complete?"
    assert detect_layout(str(folder)).warnings == (expected,)


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 1000, -1])
def test_pickle_cut_anywhere_is_cut_off(tmp_path, make, cut):
    folder = make.cifar(tmp_path)
    content = (folder / "data_batch_4").read_bytes()
    (folder / "data_batch_4").write_bytes(content[:cut])
    assert "data_batch_4 is cut off: " in problem_with(folder)


@pytest.mark.parametrize(
    "batch, expected",
    [
        ([1, 2], "no array [N, 3072] of uint8"),
        ({"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]}, "no array [N, 3072] of uint8"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "no list of 2 labels"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, "it has labels from 0 to 10"),
    ],
)
def test_other_pickles(tmp_path, make, batch, expected):
    folder = make.cifar(tmp_path)
    (folder / "test_batch").write_bytes(pickle.dumps(batch, 2))
    text = problem_with(folder)
    assert text.startswith(f"--data_path={folder}/test_batch: not a CIFAR file: {expected}")


def test_garbage_instead_of_a_pickle(tmp_path, make):
    folder = make.cifar(tmp_path)
    (folder / "test_batch").write_bytes(b"<html>404</html>")
    assert "test_batch: not a CIFAR file: its pickle cannot be read" in problem_with(folder)
