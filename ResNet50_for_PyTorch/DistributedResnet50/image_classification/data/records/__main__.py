"""`python3 -m image_classification.data.records`: packs an image folder into records, checks and describes them."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NoReturn

# torch would load torch_npu by itself and fail as a whole where that fails; nothing here needs it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from image_classification.data.layouts import absolute_path
from image_classification.data.processes import default_workers
from image_classification.data.records.manifest import BAD_FILES, Manifest, SplitEntry, StoreOptions, read_manifest
from image_classification.data.records.pack import CONTINUE, pack
from image_classification.data.records.verify import verify
from mmcls.utils.errors import RequestError

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the training program does."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(self.prog, message.removeprefix("argument "), "--help lists the options")


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns the exit status of docs/architecture.md."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        arguments = _parser().parse_args([_with_underscores(argument) for argument in argv])
        arguments.run(arguments)
    except RequestError as error:
        return _end(error.exit_status, str(error))
    except OSError as error:
        return _end(2, f"{error.filename or arguments.data_path}: {error.strerror or error}; {CONTINUE}")
    except BrokenProcessPool:
        return _end(1, f"a process was killed, perhaps for want of memory; take fewer --workers and {CONTINUE}")
    except KeyboardInterrupt as stopped:
        number = stopped.args[0] if stopped.args else signal.SIGINT
        return _end(128 + number, f"stopped by {signal.Signals(number).name}; {CONTINUE}")
    return 0


def _stop(number: int, _frame) -> NoReturn:
    raise KeyboardInterrupt(number)


def _end(status: int, line: str) -> int:
    print(f"error: {line}", file=sys.stderr, flush=True)
    return status


def _with_underscores(argument: str) -> str:
    option, equals, value = argument.partition("=")
    return option.replace("-", "_").replace("__", "--", 1) + equals + value if option.startswith("--") else argument


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="records", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="pack|verify|info")

    def add(name: str, run, text: str, data: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        command.add_argument("--data_path", required=True, metavar="FOLDER", help=data)
        return command

    source = "image folder with train/<class>/ and val/<class>/"
    command = add("pack", _pack, "Packs an image folder; the same command continues one that was interrupted.", source)
    command.add_argument("--out", required=True, metavar="FOLDER", help="the records folder to make")
    command.add_argument(
        "--shard_bytes", type=_bytes, default=StoreOptions.shard_bytes, metavar="SIZE",
        help="about the largest size of a file, 1GiB unless given; small data sets are cut into smaller ones",
    )  # fmt: skip
    sizes = command.add_mutually_exclusive_group()
    sizes.add_argument("--resize_short", type=_positive, metavar="PIXELS", help="reduce longer short sides to this")
    sizes.add_argument("--max_side", type=_positive, metavar="PIXELS", help="reduce longer long sides to this")
    command.add_argument(
        "--quality", type=_quality, default=StoreOptions.quality, metavar="1..100",
        help="of the JPEG files that reduced pictures become, 90 unless given; others keep their bytes",
    )  # fmt: skip
    command.add_argument(
        "--on_bad_image", choices=("stop", "skip"), default="stop",
        help=f"what a picture that cannot be decoded does: stop, or be left out and listed in {BAD_FILES}",
    )  # fmt: skip
    command.add_argument(
        "--allow_empty_classes", action="store_true", help="accept class folders of train/ that hold no image"
    )
    _add_workers(command)
    records = "records folder"
    _add_workers(add("verify", _verify, "Reads everything back: checksums and pictures.", records))
    add("info", _info, "Describes a records folder.", records)
    return parser


def _add_workers(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=_positive, default=default_workers(), metavar="N",
                         help="processes; one for each core unless given")  # fmt: skip


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _quality(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 100")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.lower())
    if not found or found[2] not in UNITS or not (size := int(float(found[1]) * UNITS[found[2]])):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 512MiB or 1GiB")
    return size


def _pack(arguments: argparse.Namespace) -> None:
    options = StoreOptions(arguments.resize_short, arguments.max_side, arguments.quality, arguments.shard_bytes)
    manifest = pack(
        arguments.data_path,
        arguments.out,
        options,
        workers=arguments.workers,
        on_bad_image=arguments.on_bad_image,
        allow_empty_classes=arguments.allow_empty_classes,
    )
    _describe(arguments.out, manifest)


def _verify(arguments: argparse.Namespace) -> None:
    manifest = verify(arguments.data_path, workers=arguments.workers, report=print)
    shards = len(manifest.train.shards) + len(manifest.val.shards)
    print(f"{manifest.train.images + manifest.val.images:,} images in {shards} shards: all whole")


def _info(arguments: argparse.Namespace) -> None:
    _describe(arguments.data_path, read_manifest(absolute_path(arguments.data_path)))


def _describe(folder: str, manifest: Manifest) -> None:
    options = manifest.options
    size = "original bytes"
    if options.resize_short or options.max_side:
        what = f"short side {options.resize_short}" if options.resize_short else f"long side {options.max_side}"
        size = f"{what} pixels at most, JPEG quality {options.quality}"
    print(f"records in {absolute_path(folder)}: {len(manifest.classes):,} classes, {size}")
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        print(f"{name}: {_numbers(split)}")
        empty = split.class_counts.count(0)
        if empty:
            print(f"{name}: {empty} classes have no image")
    left_out = manifest.train.left_out + manifest.val.left_out
    if left_out:
        print(f"left out because they cannot be read: {left_out:,} images, listed in {BAD_FILES}")


def _numbers(split: SplitEntry) -> str:
    counts = f"{min(split.class_counts):,} to {max(split.class_counts):,} a class"
    return f"{split.images:,} images, {counts}, {split.bytes:,} bytes in {len(split.shards)} shards"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
