"""Packing and reading records: the same pictures, names and labels come back, whatever interrupts the packing."""

import io
import os
import pickle
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from image_classification.config import DataConfig
from image_classification.data import ImageReadError, detect_layout, open_datasets
from image_classification.data.decode import Picture
from image_classification.data.order import epoch_order, rank_batches
from image_classification.data.records import plan
from image_classification.data.records.dataset import RecordDataset
from image_classification.data.records.manifest import ShardEntry, SplitEntry, StoreOptions, read_manifest
from image_classification.data.records.pack import pack
from image_classification.data.records.shards import Record, Shard, write_shard
from image_classification.data.records.store import stored_bytes
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
def test_no_picture_twice_in_an_epoch_at_any_number_of_ranks(counts, cuts, ranks, batch, seed, epoch):
    num_images = sum(counts)
    bounds = sorted({0, num_images, *(cut for cut in cuts if cut < num_images)})
    shards = tuple(ShardEntry(f"{start}", stop - start, 0, "") for start, stop in pairwise(bounds))
    entry = SplitEntry(tuple(counts), 0, shards)
    options = {"image_size": 8, "small_images": True, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    data = RecordDataset(Path("/"), "train", tuple(map(str, counts)), entry, **options)
    steps = num_images // (batch * ranks)
    order = epoch_order(seed, epoch, len(data))
    shares = [rank_batches(order, batch, steps, rank, ranks) for rank in range(ranks)]
    assert {share.shape for share in shares} == {(steps, batch)}
    places = [data._place(i) for share in shares for i in share.ravel()]
    assert len(set(places)) == len(places) == num_images - num_images % (batch * ranks)
    assert all(0 <= row < shards[number].images for number, row in places)
    assert all(bounds[number] + row == i for i, (number, row) in ((i, data._place(i)) for i in range(num_images)))


# What is stored

REDUCED = [
    (StoreOptions(resize_short=40), (80, 60), (53, 40)),
    (StoreOptions(resize_short=40), (60, 80), (40, 53)),
    (StoreOptions(max_side=40), (80, 60), (40, 30)),
    (StoreOptions(max_side=40), (4000, 2), (40, 1)),
]


def jpeg(size, seed=0, mode="RGB", image_format="JPEG", **options):
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, size=(4, 4, 3), dtype=np.uint8)).resize(size, Image.BICUBIC)
    file = io.BytesIO()
    smooth.convert(mode).save(file, image_format, **options)
    return file.getvalue()


@pytest.mark.parametrize("options, size, expected", REDUCED)
def test_larger_pictures_are_reduced(options, size, expected):
    data = jpeg(size, quality=95)
    stored = stored_bytes(data, options)
    with Image.open(io.BytesIO(stored)) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", expected)
        reduced = np.asarray(image, dtype=float)
    with Image.open(io.BytesIO(data)) as image:
        reference = np.asarray(image.resize(expected, Image.BOX), dtype=float)
    assert np.abs(reduced - reference).mean() < 4


def test_quality_is_that_of_the_option():
    sizes = [len(stored_bytes(jpeg((300, 200)), StoreOptions(resize_short=100, quality=q))) for q in (10, 50, 90, 100)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4


@pytest.mark.parametrize("options", [StoreOptions(), StoreOptions(resize_short=60), StoreOptions(max_side=80)])
@pytest.mark.parametrize("mode, image_format", [("RGB", "JPEG"), ("CMYK", "JPEG"), ("L", "PNG"), ("P", "GIF")])
def test_pictures_within_the_limits_keep_their_bytes(options, mode, image_format):
    data = jpeg((80, 60), mode=mode, image_format=image_format)
    assert stored_bytes(data, options) == data


@pytest.mark.parametrize("mode, image_format", [("CMYK", "JPEG"), ("L", "JPEG"), ("RGBA", "PNG"), ("P", "GIF")])
def test_a_reduced_picture_shows_what_the_folder_shows(mode, image_format):
    data = jpeg((160, 120), mode=mode, image_format=image_format)
    reduced = Picture(stored_bytes(data, StoreOptions(resize_short=60, quality=100))).pixels()
    whole = Image.fromarray(Picture(data).pixels()).resize((80, 60), Image.BOX)
    assert np.abs(reduced.astype(float) - np.asarray(whole)).mean() < 4


def test_16_bit_grey_keeps_its_contrast():
    grey = np.linspace(0, 65535, 128 * 128).astype(np.uint16).reshape(128, 128)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    pixels = Picture(stored_bytes(file.getvalue(), StoreOptions(resize_short=64))).pixels()
    assert pixels.min() < 4 and pixels.max() > 251 and 120 < pixels.mean() < 135


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_exif_orientation_survives_the_reduction(image_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg((160, 80), image_format=image_format, exif=exif)
    stored = stored_bytes(data, StoreOptions(resize_short=40))
    for rotation in (False, True):
        reduced, whole = Picture(stored, rotation), Picture(data, rotation)
        assert (reduced.width * 2, reduced.height * 2) == (whole.width, whole.height)
        reference = Image.fromarray(np.ascontiguousarray(whole.pixels())).resize((reduced.width, reduced.height))
        assert np.abs(reduced.pixels().astype(float) - np.asarray(reference)).mean() < 6


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


@pytest.mark.parametrize("damage", ["byte", "zeros"])
def test_a_damaged_record_ends_the_training_with_its_name(packed, damage):
    shards = packed.manifest.train.shards
    path, index = packed.out / shards[1].file, shards[0].images + 1
    train = opened(packed.out).train
    content = bytearray(path.read_bytes())
    start = content.index(train.encoded(index))
    if damage == "byte":
        content[start + 400] ^= 1
    else:
        # The zeros reach into what Arrow says about the record.
        content[start - 300 : start + 300] = bytes(600)
    path.write_bytes(content)
    train = opened(packed.out).train
    errors = []
    for index in range(len(train)):
        try:
            train.training_view(index, 0, 0)
        except ImageReadError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert errors[0].startswith(f"cannot read image {path}, record 1 (") and "damaged: " in errors[0]
    assert "class ant, train" in errors[0]


def test_missing_and_short_shards_are_found_before_training(packed):
    first, second = (packed.out / shard.file for shard in packed.manifest.train.shards[:2])
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(RequestError, match=rf"{first.name} is missing, {second.name} has .* bytes; copy them again"):
        detect_layout(str(packed.out))


@pytest.mark.parametrize("damage", ["cut", "no counts", "version"])
def test_damaged_manifest(packed, damage):
    path = packed.out / "manifest.json"
    text = path.read_text()
    damaged = {"cut": text[:200], "no counts": text.replace("class_counts", "x"), "version": text.replace('"version": 1', '"version": 9')}  # fmt: skip
    path.write_text(damaged[damage])
    with pytest.raises(RequestError, match="version 9" if damage == "version" else "is damaged"):
        detect_layout(str(packed.out))


def test_somebody_elses_manifest_is_no_records_folder(tmp_path, make):
    make.cifar(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    assert detect_layout(str(tmp_path)).kind == "cifar10"


@settings(max_examples=5)
@given(st.integers(0, 10**9))
def test_everything_is_one_record_whatever_its_size(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    records = [Record(rng.bytes(rng.integers(0, 3000)), int(rng.integers(0, 2**31)), f"{i}") for i in range(20)]
    path = tmp_path_factory.mktemp("shard") / "x.arrow"
    assert write_shard(path, records) == len(Shard(path)) == 20
    shard = Shard(path)
    assert [Record(shard.image(i), shard.label(i), shard.name(i)) for i in range(20)] == records
