"""Small data sets in every layout, made anew for each test."""

import pickle
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

CLASSES = ("ant", "bee", "cow")
IMAGE_BYTES = 3 * 32 * 32


def write_image(path: Path, size=(40, 48), mode="RGB", image_format="JPEG", seed=0) -> np.ndarray:
    """Writes random pixels; returns them as they were before encoding."""
    pixels = np.random.default_rng(seed).integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path, image_format)
    return pixels


def write_folder(root: Path, train=(8, 8, 8), val=(4, 3, 3), size=(40, 48)) -> Path:
    for split, counts in (("train", train), ("val", val)):
        for name, count in zip(CLASSES, counts):
            for i in range(count):
                write_image(root / split / name / f"{name}_{i}.JPEG", size=size, seed=i)
    return root


def cifar_contents(num_classes: int, files: tuple[str, ...], images_per_file: int) -> dict:
    rng = np.random.default_rng(num_classes)
    return {
        name: (
            rng.integers(0, 256, size=(images_per_file, IMAGE_BYTES), dtype=np.uint8),
            [int(label) for label in rng.integers(0, num_classes, size=images_per_file)],
        )
        for name in files
    }


def write_cifar(parent: Path, num_classes=10, version="python", images_per_file=6, key=str.encode, protocol=2) -> Path:
    """Writes CIFAR-10 or CIFAR-100 with random pixels, the same ones in both versions."""
    ten = num_classes == 10
    files = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch") if ten else ("train", "test")
    binary = version == "binary"
    names = {True: ("cifar-10-batches-py", "cifar-10-batches-bin"), False: ("cifar-100-python", "cifar-100-binary")}
    folder = parent / names[ten][binary]
    folder.mkdir(parents=True)
    for name, (pixels, labels) in cifar_contents(num_classes, files, images_per_file).items():
        fine = np.array(labels, dtype=np.uint8)[:, None]
        if binary:
            columns = [fine, pixels] if ten else [fine // 5, fine, pixels]
            np.hstack(columns).tofile(folder / f"{name}.bin")
            continue
        batch = {key("data"): pixels, key("labels" if ten else "fine_labels"): labels, key("batch_label"): b"x"}
        if not ten:
            batch[key("coarse_labels")] = [label // 5 for label in labels]
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    if not binary:
        titles = [b"class %d" % i for i in range(num_classes)]
        meta = {key("label_names" if ten else "fine_label_names"): titles}
        (folder / ("batches.meta" if ten else "meta")).write_bytes(pickle.dumps(meta, protocol))
    return folder


def write_archive(parent: Path, name="cifar-10-python.tar.gz", **options) -> Path:
    """Packs what `write_cifar` makes and removes the folder."""
    folder = write_cifar(parent / "packing", **options)
    archive = parent / name
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.parent.rmdir()
    return archive


@pytest.fixture
def make(tmp_path, monkeypatch):
    """The builders above, and a user's cache that is not the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return SimpleNamespace(image=write_image, folder=write_folder, cifar=write_cifar, archive=write_archive)
