"""Batches made ahead of the step that uses them."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import torch

from image_classification.data.limits import LoaderError, stalled_line
from mmcls.utils.device import side_stream

PATIENCE_SECONDS = 5.0
"""How long `stop` waits for the batch that is being made."""

Batch = tuple[torch.Tensor, torch.Tensor]


class Prefetcher:
    """Runs an iterator of batches in a background thread, some batches ahead; iterating gives the same batches.

    On an accelerator the thread works on a stream of its own, so copies and augmentation run beside the training step.
    What the iterator raises is raised to the caller.

    Args:
        batches: consumed and closed by the thread.
        depth: finished batches that may wait.
        device: where the batches are.
        phase: what the batches are for, for the error line.
        timeout_seconds: how long to wait for a batch.
    """

    def __init__(
        self, batches: Iterator[Batch], *, depth: int, device: torch.device, phase: str, timeout_seconds: float
    ):
        self._batches, self._phase, self._timeout_seconds = batches, phase, timeout_seconds
        self._stream = side_stream(device)
        self._ready: queue.Queue = queue.Queue(depth)
        self._stopping = threading.Event()
        # A thread that hangs in a read must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._stream or nullcontext():
                while not self._stopping.is_set():
                    batch = next(self._batches, None)
                    self._ready.put((batch, self._stream and self._stream.mark()))
                    if batch is None:
                        break
                    del batch
                self._batches.close()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._ready.put((error, None))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            LoaderError: none came in time.
        """
        try:
            batch, mark = self._ready.get(timeout=self._timeout_seconds)
        except queue.Empty:
            raise LoaderError(stalled_line(self._phase, self._timeout_seconds)) from None
        if batch is None:
            raise StopIteration
        if isinstance(batch, BaseException):
            raise batch
        if self._stream:
            self._stream.hand_over(mark, batch)
        return batch

    def stop(self) -> bool:
        """Ends the thread after the batch that it is at, and drops the batches that wait.

        Returns:
            Whether it has ended; one that hangs in a read is left alone.
        """
        self._stopping.set()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._drop_ready()
            self._thread.join(0.01)
        self._drop_ready()
        return not self._thread.is_alive()

    def _drop_ready(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
