"""Compares formats that could hold packed images: `python3 benchmarks/record_formats.py --data_path=/data/imagenet`.

Every installed format gets the same JPEG files (short side 256, quality 90) and gives them back, in one process. Times
are microseconds an image of process time, user and system, of all threads, the best of the runs:

write      writing it
random     reading every image once in random order, by its number
stream     reading every image once by the format's own shuffled iteration, for those that train that way
decoded    random (stream where there is no random access) and decoding by simplejpeg
cold read  bytes that the disk delivers for a byte asked for, when a sixteenth of the images is read in random order and
           nothing is in memory: what a data set larger than the memory costs
size       on disk, for a byte of images

The formats are not requirements of this repository:
pip install array_record lmdb webdataset litdata mosaicml-streaming
"""

import argparse
import gc
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ResNet50_for_PyTorch" / "DistributedResnet50")]

import numpy as np
import simplejpeg
from common import machine_line, process_seconds
from PIL import Image

from image_classification.data.records.index import read_image
from image_classification.data.records.shards import Record, read_index, write_shard

IMAGES_PER_SHARD = 1024
COLD_SHARE = 16
Reader = Callable[[int], bytes]


def write_arrayrecord(folder: Path, images: Sequence[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for shard in range(0, len(images), IMAGES_PER_SHARD):
        writer = ArrayRecordWriter(str(folder / f"{shard:06d}.array_record"), "group_size:1,uncompressed")
        for image in images[shard : shard + IMAGES_PER_SHARD]:
            writer.write(image)
        writer.close()


def open_arrayrecord(folder: Path) -> Reader:
    from array_record.python.array_record_module import ArrayRecordReader

    # Without these it reads ahead for records that a random order does not want.
    options = "readahead_buffer_size:0"
    readers = [ArrayRecordReader(str(path), options) for path in sorted(folder.iterdir())]
    return lambda i: readers[i // IMAGES_PER_SHARD].read([i % IMAGES_PER_SHARD])[0]


def write_arrow(folder: Path, images: Sequence[bytes]) -> None:
    import pyarrow

    schema = pyarrow.schema([("image", pyarrow.binary())])
    for shard in range(0, len(images), IMAGES_PER_SHARD):
        with pyarrow.ipc.new_file(str(folder / f"{shard:06d}.arrow"), schema) as writer:
            for image in images[shard : shard + IMAGES_PER_SHARD]:
                writer.write(pyarrow.record_batch([pyarrow.array([image], pyarrow.binary())], schema=schema))


def open_arrow(folder: Path) -> Reader:
    import pyarrow

    files = [pyarrow.ipc.open_file(pyarrow.OSFile(str(path))) for path in sorted(folder.iterdir())]
    return lambda i: files[i // IMAGES_PER_SHARD].get_batch(i % IMAGES_PER_SHARD).column(0)[0].as_py()


def write_ours(folder: Path, images: Sequence[bytes]) -> None:
    for shard in range(0, len(images), IMAGES_PER_SHARD):
        records = (Record(image, i % 1000, f"{i}") for i, image in enumerate(images[shard : shard + IMAGES_PER_SHARD]))
        write_shard(folder / f"{shard:06d}.arrow", records)


def open_ours(folder: Path) -> Reader:
    paths = sorted(folder.iterdir())
    index = np.concatenate([read_index(path, number)[0] for number, path in enumerate(paths)])
    for path in paths:
        drop_from_page_cache(path)  # a run has the index from a file of its own
    files = [path.open("rb", buffering=0) for path in paths]
    return lambda i: read_image(files[i // IMAGES_PER_SHARD], index[i])


def write_lmdb(folder: Path, images: Sequence[bytes]) -> None:
    import lmdb

    with lmdb.open(str(folder), map_size=2**40) as environment, environment.begin(write=True) as transaction:
        for i, image in enumerate(images):
            transaction.put(f"{i:08d}".encode(), image)


def open_lmdb(folder: Path) -> Reader:
    import lmdb

    environment = lmdb.open(str(folder), readonly=True, lock=False, readahead=False)
    transaction = environment.begin()
    return lambda i: transaction.get(f"{i:08d}".encode())


def write_webdataset(folder: Path, images: Sequence[bytes]) -> None:
    import webdataset

    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=IMAGES_PER_SHARD, verbose=0) as writer:
        for i, image in enumerate(images):
            writer.write({"__key__": f"{i:08d}", "jpg": image, "cls": i % 1000})


def stream_webdataset(folder: Path) -> Iterable[bytes]:
    import webdataset

    shards = sorted(map(str, folder.iterdir()))
    samples = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0, empty_check=False).shuffle(1000)
    return (sample["jpg"] for sample in samples)


def write_litdata(folder: Path, images: Sequence[bytes]) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=IMAGES_PER_SHARD)
    for i, image in enumerate(images):
        writer[i] = {"image": image, "label": i % 1000}
    writer.done()
    writer.merge()


def open_litdata(folder: Path) -> Reader:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder))
    return lambda i: dataset[i]["image"]


def stream_litdata(folder: Path) -> Iterable[bytes]:
    from litdata import StreamingDataset

    return (sample["image"] for sample in StreamingDataset(str(folder), shuffle=True))


def write_mds(folder: Path, images: Sequence[bytes]) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}, size_limit="64mb") as writer:
        for i, image in enumerate(images):
            writer.write({"image": image, "label": i % 1000})


def open_mds(folder: Path) -> Reader:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), batch_size=128)
    return lambda i: dataset[i]["image"]


def stream_mds(folder: Path) -> Iterable[bytes]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), batch_size=128, shuffle=True)
    return (sample["image"] for sample in dataset)


FORMATS = {
    "ArrayRecord": ("array_record", write_arrayrecord, open_arrayrecord, None),
    "Arrow, as built here": ("pyarrow", write_ours, open_ours, None),
    "Arrow, a batch an image": ("pyarrow", write_arrow, open_arrow, None),
    "LMDB": ("lmdb", write_lmdb, open_lmdb, None),
    "WebDataset": ("webdataset", write_webdataset, None, stream_webdataset),
    "LitData": ("litdata", write_litdata, open_litdata, stream_litdata),
    "MosaicML Streaming": ("streaming", write_mds, open_mds, stream_mds),
}
DISTRIBUTIONS = {"streaming": "mosaicml-streaming"}


def microseconds_each(images: Iterable, use: Callable[[object], object]) -> float:
    """Process time of an image: reading it and `use`."""
    count, started = 0, process_seconds()
    for image in images:
        use(image)
        count += 1
    return (process_seconds() - started) / count * 1e6


def drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def small_jpegs(data_path: Path, count: int) -> list[bytes]:
    """`count` JPEG files of 256 pixels short side, quality 90; pictures repeat where the folder has fewer."""
    encoded = []
    for path in sorted(data_path.rglob("*.JPEG"))[:count]:
        with Image.open(path) as image:
            scale = 256 / min(image.size)
            image = image.convert("RGB").resize((round(image.width * scale), round(image.height * scale)))
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=90)
            encoded.append(buffer.getvalue())
    return [encoded[i % len(encoded)] for i in range(count)]


def measure(name: str, folder: Path, images: list[bytes], runs: int) -> str:
    _, write, open_reader, stream = FORMATS[name]
    started = process_seconds()
    write(folder, images)
    write_us = (process_seconds() - started) / len(images) * 1e6
    order = np.random.default_rng(0).permutation(len(images)).tolist()
    random_us = stream_us = cold_share = float("nan")
    read_all = (lambda: stream(folder)) if open_reader is None else partial(map, open_reader(folder), order)
    if open_reader:
        assert all(image == images[i] for i, image in zip(order, read_all())), name
        random_us = min(microseconds_each(read_all(), len) for _ in range(runs))
    if stream:
        stream_us = min(microseconds_each(stream(folder), len) for _ in range(runs))
    decoded_us = min(microseconds_each(read_all(), simplejpeg.decode_jpeg) for _ in range(runs))
    if open_reader:
        read_all = None  # open files and maps keep pages in memory
        gc.collect()
        for path in filter(Path.is_file, folder.rglob("*")):
            drop_from_page_cache(path)
        read = open_reader(folder)
        before = bytes_from_disk()
        sizes = [len(read(i)) for i in order[::COLD_SHARE]]
        cold_share = (bytes_from_disk() - before) / sum(sizes)
    size = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) / sum(map(len, images))
    return "".join(f"{figure:11.2f}" for figure in (write_us, random_us, stream_us, decoded_us, cold_share, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_path", type=Path, required=True, help="folder with *.JPEG anywhere below it")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5, help="the best one counts")
    parser.add_argument("--scratch", type=Path, help="where the formats are written; take the disk to be measured")
    arguments = parser.parse_args()
    print(machine_line())
    images = small_jpegs(arguments.data_path, arguments.images)
    bare = min(microseconds_each(images, simplejpeg.decode_jpeg) for _ in range(arguments.runs))
    print(f"{len(images)} images of {np.mean(list(map(len, images))):.0f} bytes; simplejpeg alone: {bare:.1f} us each")
    columns = ("write", "random", "stream", "decoded", "cold read", "size")
    print(f"{'':32}" + "".join(f"{column:>11}" for column in columns))
    for name, (module, *_) in FORMATS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{name:32} not installed")
            continue
        folder = Path(tempfile.mkdtemp(dir=arguments.scratch))
        try:
            line = measure(name, folder, images, arguments.runs)
            print(f"{name + ' ' + version(DISTRIBUTIONS.get(module, module)):32}{line}", flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
