"""Records against files, the bare decoder and other formats, as data_pipeline.py measures, and packing in parallel.

    crops_records          training crops from records packed with --resize_short=256, against the original files
    records_vs_decode      the same records, against simplejpeg decoding the same bytes and nothing else
    records_vs_webdataset  the same, against WebDataset reading the same bytes: sequential shards, shuffle buffer of 1,000
    records_vs_litdata     the same, against LitData's shuffled StreamingDataset of the same bytes
    packing                wall time of pack with two processes against one; the folder is repeated to 4,000 pictures

Decoder and crops are ours in all of them but records_vs_decode. A format that is not installed is left out.

    python3 benchmarks/record_claims.py --imagenet /data/imagenet [--claims packing] [--pairs 5]
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

# First, because it puts the package on the path.
from data_pipeline import Options, our_batches

# isort: split
import simplejpeg
import torch
import tyro
from common import PairedTimes, machine_line, print_claim, process_seconds, time_alternating
from record_formats import write_litdata, write_webdataset

from image_classification.config import DataConfig
from image_classification.data import augment, detect_layout, open_datasets
from image_classification.data.decode import Picture, prepare_worker
from image_classification.data.order import image_generator
from image_classification.data.records.manifest import StoreOptions
from image_classification.data.records.pack import pack

PACKED_PICTURES = 4000
PACK_WORKERS = 2


@dataclass
class RecordOptions(Options):
    claims: tuple[str, ...] = (
        "crops_records",
        "records_vs_decode",
        "records_vs_webdataset",
        "records_vs_litdata",
        "packing",
    )
    scratch: Path | None = None
    """Where records and other formats are written, the system's folder for temporary files unless given."""


def _view(data: bytes, index: int, size: int) -> torch.Tensor:
    view = augment.big_training_view(Picture(data), size, image_generator(0, 0, index))
    return torch.from_numpy(view.copy()).permute(2, 0, 1)


def _claim(name: str, ours: Callable, peer: Callable, options: RecordOptions) -> None:
    times = time_alternating(ours, peer, num_pairs=options.pairs, num_warmup=1, clock=process_seconds)
    print_claim(name, *times.per_second(options.images), times.speedup)


def crops_records(records, original, options: RecordOptions, _scratch: Path) -> None:
    _claim("crops_records", our_batches(records, options), our_batches(original, options), options)


def records_vs_decode(records, _original, options: RecordOptions, _scratch: Path) -> None:
    encoded = _stored_bytes(records, options)

    def decode() -> None:
        for data in encoded:
            simplejpeg.decode_jpeg(data)

    _claim("records_vs_decode", our_batches(records, options), decode, options)


def records_vs_webdataset(records, _original, options: RecordOptions, scratch: Path) -> None:
    import webdataset

    folder = scratch / "webdataset"
    folder.mkdir()
    write_webdataset(folder, _stored_bytes(records, options))
    shards = sorted(map(str, folder.iterdir()))

    def view(sample: dict) -> tuple[torch.Tensor, int]:
        return _view(sample["jpg"], int(sample["__key__"]), options.crop), int(sample["cls"])

    def read() -> None:
        dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0, empty_check=False)
        dataset = dataset.shuffle(1000).map(view)
        loader = torch.utils.data.DataLoader(dataset, options.batch_size, num_workers=1, worker_init_fn=_start_worker)
        _count(loader, options)

    _claim("records_vs_webdataset", our_batches(records, options), read, options)


def records_vs_litdata(records, _original, options: RecordOptions, scratch: Path) -> None:
    import litdata

    folder = scratch / "litdata"
    folder.mkdir()
    write_litdata(folder, _stored_bytes(records, options))

    class Views(litdata.StreamingDataset):
        def __getitem__(self, index) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return _view(sample["image"], sample["label"], options.crop), sample["label"]

    def read() -> None:
        dataset = Views(str(folder), shuffle=True)
        loader = litdata.StreamingDataLoader(
            dataset, batch_size=options.batch_size, num_workers=1, worker_init_fn=_start_worker
        )
        _count(loader, options)

    _claim("records_vs_litdata", our_batches(records, options), read, options)


def packing(_records, original, options: RecordOptions, scratch: Path) -> None:
    source = scratch / "source"
    for split, count in (("train", PACKED_PICTURES), ("val", 1)):
        (source / split / "all").mkdir(parents=True)
        for i in range(count):
            (source / split / "all" / f"{i}.jpg").symlink_to(original.path(i % len(original)).resolve())
    times = PairedTimes([], [])
    for _ in range(options.pairs):
        for workers, seconds in ((PACK_WORKERS, times.ours_seconds), (1, times.peer_seconds)):
            started = time.perf_counter()
            pack(str(source), str(scratch / "out"), StoreOptions(resize_short=256), workers=workers)
            seconds.append(time.perf_counter() - started)
            shutil.rmtree(scratch / "out")
    print_claim("packing", *times.per_second(PACKED_PICTURES), times.speedup)


def _stored_bytes(records, options: RecordOptions) -> list[bytes]:
    return [records.encoded(i % len(records)) for i in range(options.images)]


def _start_worker(_worker: int) -> None:
    prepare_worker()


def _count(batches: Iterable, options: RecordOptions) -> None:
    assert sum(len(labels) for _, labels in batches) == options.images


CLAIMS = {
    function.__name__: function
    for function in (crops_records, records_vs_decode, records_vs_webdataset, records_vs_litdata, packing)
}


def main(options: RecordOptions) -> None:
    torch.set_num_threads(1)
    print(machine_line())
    print(f"{options.images} images a run, batches of {options.batch_size}, {options.pairs} pairs")
    scratch = Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        original = open_datasets(detect_layout(str(options.imagenet)), DataConfig(), options.crop).train
        pack(str(options.imagenet), str(scratch / "records"), StoreOptions(resize_short=256), workers=1)
        records = open_datasets(detect_layout(str(scratch / "records")), DataConfig(), options.crop).train
        for name in options.claims:
            try:
                CLAIMS[name](records, original, options, scratch)
            except ModuleNotFoundError as error:
                print(f"{name}: not measured, {error.name} is not installed")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(RecordOptions)))
