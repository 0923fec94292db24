"""Packing and reading records: the same pictures, names and labels come back, whatever interrupts the packing."""

import os
import pickle
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from image_classification.config import DataConfig
from image_classification.data import ImageReadError, detect_layout, open_datasets
from image_classification.data.decode import DecodeError
from image_classification.data.order import epoch_order, rank_batches
from image_classification.data.records import plan, shards
from image_classification.data.records.dataset import RecordDataset
from image_classification.data.records.index import INDEX_ROW, read_image
from image_classification.data.records.manifest import ShardEntry, SplitEntry, StoreOptions, read_manifest
from image_classification.data.records.pack import pack
from image_classification.data.records.shards import Record, read_index, read_name, write_shard
from mmcls.utils.errors import RequestError

SMALL_SHARDS = StoreOptions(shard_bytes=8_000)
"""About three of the pictures of `make.folder`."""


def opened(path, image_size=32):
    return open_datasets(detect_layout(str(path)), DataConfig(data_path=str(path)), image_size)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def packed(tmp_path, make):
    """A small folder and the records that it was packed into, in several shards."""
    source, out = make.folder(tmp_path / "source"), tmp_path / "out"
    manifest = pack(str(source), str(out), SMALL_SHARDS, workers=1)
    return SimpleNamespace(source=source, out=out, manifest=manifest)


def test_records_give_what_the_folder_gives(packed):
    assert len(packed.manifest.train.shards) > 2
    folder, records = opened(packed.source), opened(packed.out)
    assert records.class_names == folder.class_names == ("ant", "bee", "cow")
    for split in ("train", "val"):
        theirs, ours = getattr(folder, split), getattr(records, split)
        assert len(ours) == len(theirs) == {"train": 24, "val": 10}[split]
        assert np.array_equal(ours.labels, theirs.labels) and ours.labels.dtype == theirs.labels.dtype
        assert (ours.mean, ours.std, ours.small_images) == (theirs.mean, theirs.std, theirs.small_images)
        for i in range(len(theirs)):
            assert ours.encoded(i) == theirs.path(i).read_bytes()
            assert os.path.relpath(theirs.path(i), theirs.root) in ours.name(i)
            assert np.array_equal(ours[i][0], theirs[i][0]) and ours[i][1] == theirs[i][1]
            assert np.array_equal(ours.training_view(i, 1, 2)[0], theirs.training_view(i, 1, 2)[0])


def test_layout(packed):
    folder, records = detect_layout(str(packed.source)), detect_layout(str(packed.out))
    assert (records.kind, records.path, records.warnings) == ("records", packed.out, ())
    assert (records.image_size, records.small_images) == (folder.image_size, folder.small_images)
    assert records.num_classes == 3 and str(packed.out) in records.description


def test_exif_option_reaches_records(packed):
    data = open_datasets(detect_layout(str(packed.out)), DataConfig(exif_rotation=True), 32)
    assert data.train.exif_rotation and not opened(packed.out).train.exif_rotation


def test_packing_twice_or_in_two_processes_gives_the_same_bytes(tmp_path, packed):
    pack(str(packed.source), str(tmp_path / "two"), SMALL_SHARDS, workers=2)
    assert contents(tmp_path / "two") == contents(packed.out)
    before = {path.name: path.stat().st_mtime_ns for path in packed.out.iterdir()}
    assert pack(str(packed.source), str(packed.out), SMALL_SHARDS, workers=1) == packed.manifest
    assert {path.name: path.stat().st_mtime_ns for path in packed.out.iterdir()} == before


def test_small_data_are_cut_for_all_processes(packed, tmp_path, monkeypatch):
    assert len(pack(str(packed.source), str(tmp_path / "one"), StoreOptions(), workers=1).train.shards) == 1
    monkeypatch.setattr(plan, "LEAST_SHARD_BYTES", 8_000)
    assert len(pack(str(packed.source), str(tmp_path / "many"), StoreOptions(), workers=1).train.shards) > 2


def test_names_of_any_kind(tmp_path, make):
    names = [
        " leading and trailing .png",
        "图片一.jpg",
        "new\nline.jpg",
        os.fsdecode(b"\xff latin.jpg"),
        "a/deeper.jpg",
    ]
    classes = ["bee bee", "类", os.fsdecode(b"\xfe")]
    for number, class_name in enumerate(classes):
        for name in names:
            make.image(tmp_path / "source/train" / class_name / name, seed=number)
        make.image(tmp_path / "source/val" / class_name / "x.jpg")
    out = tmp_path / os.fsdecode(b"\xff out")
    pack(str(tmp_path / "source"), str(out), SMALL_SHARDS, workers=1)
    data = opened(out)
    assert sorted(data.class_names) == sorted(classes)
    found = {data.train.name(i).split("(", 1)[1].removesuffix(")") for i in range(len(data.train))}
    assert found == {f"{class_name}/{name}" for class_name in classes for name in names}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_no_open_file(packed, method):
    train = opened(packed.out).train
    here = [train[i][0] for i in range(len(train))]
    assert np.array_equal(pickle.loads(pickle.dumps(train))[7][0], here[7])
    # In a fork, the files opened before it are read by both.
    loader = DataLoader(train, batch_size=None, num_workers=2, multiprocessing_context=method)
    for i, (view, _) in enumerate(loader):
        assert np.array_equal(view, here[i]) and np.array_equal(train[i][0], here[i])


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(sum),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    ranks=st.integers(1, 9),
    batch=st.integers(1, 7),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 100),
)
def test_no_picture_twice_in_an_epoch_at_any_number_of_ranks(tmp_path_factory, counts, cuts, ranks, batch, seed, epoch):
    num_images = sum(counts)
    bounds = sorted({0, num_images, *(cut for cut in cuts if cut < num_images)})
    entries = tuple(ShardEntry(f"{start}", stop - start, 0, "") for start, stop in pairwise(bounds))
    folder = tmp_path_factory.mktemp("records")
    index = np.zeros(num_images, INDEX_ROW)
    index["shard"] = np.repeat(np.arange(len(entries)), np.diff(bounds))
    np.save(folder / "train.index.npy", index)
    options = {"image_size": 8, "small_images": True, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    data = RecordDataset(folder, "train", tuple(map(str, counts)), SplitEntry(tuple(counts), 0, "", entries), **options)
    steps = num_images // (batch * ranks)
    order = epoch_order(seed, epoch, len(data))
    shares = [rank_batches(order, batch, steps, rank, ranks) for rank in range(ranks)]
    assert {share.shape for share in shares} == {(steps, batch)}
    records = [data.name(int(i)) for share in shares for i in share.ravel()]
    assert len(set(records)) == len(records) == num_images - num_images % (batch * ranks)
    for number, (start, stop) in enumerate(pairwise(bounds)):
        for i in {start, stop - 1}:
            assert data.name(i).startswith(f"{folder / entries[number].file}, record {i - start} (")


# What goes wrong


def test_bad_pictures_stop_the_packing_and_are_all_named(tmp_path, make):
    source, out = make.folder(tmp_path / "source"), tmp_path / "out"
    bad = [source / "train/bee/bee_1.JPEG", source / "train/bee/bee_3.JPEG"]
    whole = [path.read_bytes() for path in bad]
    bad[0].write_bytes(whole[0][: len(whole[0]) // 2])
    bad[1].write_bytes(b"")
    with pytest.raises(RequestError) as caught:
        pack(str(source), str(out), StoreOptions(), workers=1)
    assert all(str(path) in str(caught.value) for path in bad)
    assert "truncated" in str(caught.value) and "empty file" in str(caught.value)
    with pytest.raises(RequestError, match="packing it has not finished"):
        detect_layout(str(out))
    for path, data in zip(bad, whole):
        path.write_bytes(data)
    pack(str(source), str(out), StoreOptions(), workers=1)
    assert len(opened(out).train) == 24


def test_bad_pictures_are_left_out_on_request(tmp_path, make):
    source, out = make.folder(tmp_path / "source", train=(3, 3, 1)), tmp_path / "out"
    bad = [source / "train/bee/bee_1.JPEG", source / "train/cow/cow_0.JPEG", source / "val/ant/ant_0.JPEG"]
    for path in bad:
        path.write_bytes(b"<html>404</html>")
    manifest = pack(str(source), str(out), SMALL_SHARDS, workers=1, on_bad_image="skip")
    assert manifest.train.class_counts == (3, 2, 0) and (manifest.train.left_out, manifest.val.left_out) == (2, 1)
    lines = (out / "bad_files.txt").read_text().splitlines()
    assert lines == [f"{path}\tnot an image" for path in bad]
    layout = detect_layout(str(out))
    assert "train has no image in: cow" in layout.warnings and any("3 images" in line for line in layout.warnings)
    data = opened(out)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1] and data.train[4][1] == 1


def test_a_split_without_a_readable_picture(tmp_path, make):
    source = make.folder(tmp_path / "source", val=(1, 0, 0))
    (source / "val/ant/ant_0.JPEG").write_bytes(b"")
    with pytest.raises(RequestError, match="no image of val/ can be read"):
        pack(str(source), str(tmp_path / "out"), StoreOptions(), workers=1, on_bad_image="skip")
    with pytest.raises(RequestError, match="has not finished"):
        read_manifest(tmp_path / "out")


@pytest.mark.parametrize("damage", ["picture", "all"])
def test_a_damaged_record_ends_the_training_with_its_name(packed, damage):
    entries = packed.manifest.train.shards
    path, index = packed.out / entries[1].file, entries[0].images + 1
    train = opened(packed.out).train
    content = bytearray(path.read_bytes())
    start = content.index(train.encoded(index))
    content[start + 400] ^= 1
    if damage == "all":
        content[-300:-20] = bytes(280)
    path.write_bytes(content)
    train = opened(packed.out).train
    errors = []
    for index in range(len(train)):
        try:
            train.training_view(index, 0, 0)
        except ImageReadError as error:
            errors.append(str(error))
    name = "ant/ant_5.JPEG" if damage == "picture" else "its name cannot be read"
    assert errors == [f"cannot read image {path}, record 1 ({name}) (class ant, train): damaged: wrong checksum"]


def test_damaged_index(packed):
    path = packed.out / "train.index.npy"
    index = np.load(path)
    index["start"][:2] = -5, 10**12
    index["shard"][2] = 99
    index["length"][3] = -1
    np.save(path, index)
    train = opened(packed.out).train
    for i in range(4):
        with pytest.raises(ImageReadError, match="damaged|Invalid argument"):
            train[i]
    np.save(path, index[1:])
    with pytest.raises(RequestError, match="does not fit the manifest"):
        opened(packed.out)
    path.write_bytes(b"")
    with pytest.raises(RequestError, match="cannot be read"):
        opened(packed.out)
    path.unlink()
    with pytest.raises(RequestError, match="train.index.npy is missing"):
        opened(packed.out)


def test_missing_and_short_shards_are_found_before_training(packed):
    first, second = (packed.out / shard.file for shard in packed.manifest.train.shards[:2])
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(RequestError, match=rf"{first.name} is missing, {second.name} has .* bytes; copy them again"):
        detect_layout(str(packed.out))


@pytest.mark.parametrize("damage", ["empty", "cut", "no counts", "version"])
def test_damaged_manifest(packed, damage):
    path = packed.out / "manifest.json"
    text = path.read_text()
    damaged = {"empty": "", "cut": text[:200], "no counts": text.replace("class_counts", "x"),
               "version": text.replace('"version": 1', '"version": 9')}  # fmt: skip
    path.write_text(damaged[damage])
    with pytest.raises(RequestError, match="version 9" if damage == "version" else "is damaged"):
        detect_layout(str(packed.out))


def test_records_copied_without_their_manifest(packed):
    (packed.out / "manifest.json").unlink()
    with pytest.raises(RequestError, match=r"holds no manifest.json; .* copy it again"):
        detect_layout(str(packed.out))


def test_somebody_elses_manifest_is_no_records_folder(tmp_path, make):
    make.cifar(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    assert detect_layout(str(tmp_path)).kind == "cifar10"


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9), batch_bytes=st.sampled_from([1, 5_000, 10**6]))
def test_records_of_any_size_come_back(tmp_path_factory, seed, batch_bytes):
    with mock.patch.object(shards, "_BATCH_BYTES", batch_bytes):
        check_round_trip(tmp_path_factory.mktemp("shard") / "x.arrow", seed)


def test_a_shard_without_a_picture(tmp_path):
    assert write_shard(tmp_path / "x.arrow", []) == 0
    assert [len(part) for part in read_index(tmp_path / "x.arrow", 0)] == [0, 0]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_damaged_is_an_error_of_ours(tmp_path, seed):
    rng = np.random.default_rng(seed)
    images = [rng.bytes(200) for _ in range(20)]
    path = tmp_path / "x.arrow"
    with mock.patch.object(shards, "_BATCH_BYTES", 1_000):
        write_shard(path, [Record(image, 7, f"n/{i}.jpg") for i, image in enumerate(images)])
    whole, _ = read_index(path, 0)
    content = bytearray(path.read_bytes())
    place = int(rng.integers(len(content)))
    damage = rng.integers(0, 256, size=rng.choice([1, 8, 64]), dtype=np.uint8).tobytes()
    content[place : place + len(damage)] = damage
    path.write_bytes(content if seed % 5 else content[:place])
    try:
        index, _ = read_index(path, 0)
    except DecodeError as error:
        assert str(error).startswith("damaged: ")
        index = whole
    with path.open("rb") as file:
        for row, image in enumerate(images):
            for read, arguments in ((read_image, (file, index[row])), (read_name, (path, row))):
                try:
                    found = read(*arguments)
                except DecodeError as error:
                    assert str(error).startswith("damaged: ")
                else:
                    assert read is read_name or found == image


def check_round_trip(path, seed):
    rng = np.random.default_rng(seed)
    records = [Record(rng.bytes(rng.integers(0, 3000)), int(rng.integers(0, 2**31)), f"{i}") for i in range(20)]
    assert write_shard(path, records) == 20
    index, labels = read_index(path, 3)
    assert set(index["shard"]) == {3} and labels.tolist() == [record.label for record in records]
    with path.open("rb") as file:
        assert [read_image(file, row) for row in index] == [record.image for record in records]
    assert [read_name(path, i) for i in range(20)] == [record.name for record in records]
