"""CUDA's streams, events and graphs behind the protocol of `ops.streams`.

in     work, which launches kernels and copies
out    events
state  the streams; the memory that graphs share
owner  the worker's main thread
ready  when `query` says so: it never waits
end    with the process
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.ops.streams import Capture, Event, Streams, Unseen


class CudaEvent:
    """A place in a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.raw.record(stream)

    def query(self) -> bool:
        """Raises RuntimeError for whatever has failed on the card: CUDA tells it to the next who asks."""
        return bool(self.raw.query())

    def ms_until(self, later: Event) -> float:
        assert isinstance(later, CudaEvent)
        return float(self.raw.elapsed_time(later.raw))


class CudaStream(Unseen):
    """Work is done on the host in the moment it is given; what it launches runs in its order on the card."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.raw = stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.raw):
            work()

    def record(self) -> CudaEvent:
        return CudaEvent(self.raw)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.raw.wait_event(event.raw)


def cuda_streams(device: torch.device) -> Streams:
    """Three streams that share no order, not even with the default one."""
    compute, load, backup = (CudaStream(torch.cuda.Stream(device)) for _ in range(3))  # type: ignore[no-untyped-call]
    return Streams(compute, load, backup, capture=_graphs(compute.raw))


def _graphs(stream: torch.cuda.Stream) -> Capture:
    """Work → a CUDA graph of it. All graphs have one memory: what one leaves there is gone when another runs."""
    memory = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        # What the work reads was written in another stream.
        torch.cuda.synchronize()
        # Once as it is: kernels are compiled and loaded, libraries take their workspaces; a graph can't.
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            work()
        with torch.cuda.stream(stream):
            # The first launch of a graph brings it to the card, which no request should wait for.
            graph.replay()
        # What it reads is written in another stream next.
        torch.cuda.synchronize()
        return graph.replay

    return capture
