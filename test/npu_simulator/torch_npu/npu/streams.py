"""Streams and events. Kernels run at once, so that they order nothing; waits are counted."""

import time

import torch

from torch_npu.npu.utils import _get_device_index


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(
            cls, device=torch.device("npu", _get_device_index(device, optional=True)), priority=priority
        )

    @property
    def npu_stream(self):
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(
            cls, device="npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._is_timed, self._recorded_at = enable_timing, None

    def record(self, stream=None):
        self._recorded_at = time.perf_counter()
        super().record(current_stream() if stream is None else stream)

    def elapsed_time(self, end_event):
        """Milliseconds; torch.Event's own refuses events of a subclass."""
        if not (self._is_timed and end_event._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_at is None or end_event._recorded_at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_at - self._recorded_at) * 1e3


def _wrap(stream, stream_id):
    return Stream(stream_id=stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device=None):
    torch.npu._lazy_init()
    stream = torch.accelerator.current_stream(_get_device_index(device, optional=True))
    return _wrap(stream, stream.stream_id)


def default_stream(device=None):
    return _wrap(current_stream(device), 0)


def set_stream(stream):
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Selects a stream, and its device, for a `with` block; none for None."""

    def __init__(self, stream_ctx):
        self.stream = stream_ctx

    def __enter__(self):
        if self.stream is not None:
            self._of_device = current_stream(self.stream.device)
            self._before = current_stream()
            set_stream(self.stream)

    def __exit__(self, *args):
        if self.stream is not None:
            set_stream(self._of_device)
            set_stream(self._before)


def stream(stream):
    return StreamContext(stream)
