"""Whole steps: the same ids as torch's layers draw, as graphs and kernel by kernel, and without a wait for the card."""

from __future__ import annotations

import argparse
import json
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from gpu.checkout import ROOT
from gpu.decode import page_bytes
from gpu.random_model import RandomBackend, RandomWeights, llama, made, shared_ring, start_of
from gpu.report import Report
from gpu.requests import Feed, Requests
from gpu.timing import Device

from headrace.ops.backend import DTYPES
from headrace.ops.cuda.backend import CudaBackend
from headrace.ops.cuda.step import DeviceStepRunner
from headrace.ops.device_worker import served_groups
from headrace.ops.kv_pool import KvPool
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.decoder import Decoder
from headrace.ops.sampler import Sampler
from headrace.ops.step import StepRunner
from headrace.ops.streams import Streams, in_order_streams
from headrace.ops.wire import Backup, Start

SLOTS: Final = 8
GOLDEN: Final = ROOT / "tests" / "data" / "smollm2-135m-instruct-q4_1.json"


def run(report: Report, options: argparse.Namespace) -> None:
    device = Device(options.dry)
    config = _small(device)
    prompts = _prompts(device, config.vocab_size)
    outputs = device.size(48, 3)
    expected = _by_torch(config, device, "float32")
    ids = expected.serve(prompts, device.size(256, 16), outputs)
    report.check("the model doesn't repeat itself", len({token for each in ids.values() for token in each}) > outputs)
    late = _late_streams() if device.dry else None
    ours, runner = _on_device(config, device, "float32", late.streams if late else None)
    with no_waits(device):
        found = ours.serve(prompts, device.size(256, 16), outputs)
    same = sum(found[slot] == ids[slot] for slot in ids)
    report.check("float32: greedy ids are those of torch's layers", same == len(ids), f"{same} of {len(ids)} requests")
    apart = max(abs(a - b) for slot in ids for a, b in zip(ours.logprobs[slot], expected.logprobs[slot]))
    report.check("float32: their log-probabilities too", apart < 5e-3, f"apart by {apart:.1e} at most")
    _graphs_equal_eager(report, ours, runner, device)
    _nothing_is_allocated(report, ours, device, prompts)
    if late is not None:
        conflicts = late.accesses.conflicts
        report.check("nothing is read or overwritten too early", not conflicts, "; ".join(conflicts[:3]))
        late.__exit__(None, None, None)
    _bfloat16(report, config, device, prompts, ids)
    _windows(report, config, device, prompts)
    _copies(report, config, device)
    if options.model is not None:
        _default_model(report, options.model, device)
    elif not device.dry:
        report.fact("the default model", "not run: its file is not at hand (--model FILE)")


def _small(device: Device) -> ModelConfig:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocab": 131}
    if not device.dry:
        shape = {"layers": 6, "hidden": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "intermediate": 2816}
        shape["vocab"] = 32000
    return llama(**shape, context=device.size(2048, 128))


def _prompts(device: Device, vocab: int) -> dict[int, list[int]]:
    """Shorter and longer than a chunk, a page, a span of attention."""
    lengths = (5, 16, 19) if device.dry else (7, 16, 255, 256, 700, 1200)
    rng = np.random.default_rng(11)
    return {slot: rng.integers(0, vocab, length).tolist() for slot, length in enumerate(lengths)}


def _start(config: ModelConfig, device: Device, dtype: str) -> Start:
    return start_of(config, device.dry, dtype, SLOTS, config.context_tokens, device.size(2048, 128))


def _by_torch(config: ModelConfig, device: Device, dtype: str) -> Requests:
    """torch's layers on the CPU."""
    start = _start(config, device, dtype)
    kind = DTYPES[dtype]
    model = Decoder(RandomWeights(config, kind, torch.device("cpu")), config, config.context_tokens)
    pages = SLOTS * config.context_tokens // 16
    pools = [KvPool(served_groups(config)[0][0], pages, 16, SLOTS, config.context_tokens, kind)]
    runner = StepRunner(model, pools, Sampler(SLOTS, config.vocab_size), (), in_order_streams())
    return Requests(runner, shared_ring(start)[1], pages)


def _late_streams() -> Any:
    """Streams that are late and see who reads what too early, in a card's place; those of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from ops.fake_streams import FakeDevice

    return FakeDevice(seed=5)


def _on_device(
    config: ModelConfig, device: Device, dtype: str, streams: Streams | None = None
) -> tuple[Requests, DeviceStepRunner]:
    start = _start(config, device, dtype)
    memory, ring = shared_ring(start)
    pages = SLOTS * config.context_tokens // 16
    with torch.inference_mode():
        runner = made(RandomBackend(config, start, streams), start, pages, memory)[0].runner
    assert isinstance(runner, DeviceStepRunner)
    return Requests(runner, ring, pages, groups=len(start.groups)), runner


@contextmanager
def no_waits(device: Device) -> Iterator[None]:
    """Whatever makes the host wait for the card raises, but looking at an event."""
    if device.dry:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _graphs_equal_eager(report: Report, requests: Requests, runner: DeviceStepRunner, device: Device) -> None:
    """Over the same KV; batches of a captured size, so that both have products of the same shapes."""
    for rows in (1, 4) if device.dry else (1, 2, 4, 8):
        outputs = []
        for graphs in (runner.graphs, {}):
            kept, runner.graphs = runner.graphs, graphs
            with no_waits(device):
                for slot in range(rows):
                    requests.begin(slot)
                requests.launch([Feed(slot, [5 + slot, 9, 2, 7], sample=False) for slot in range(rows)])
                requests.launch([Feed(slot, [3]) for slot in range(rows)])
                for _ in range(device.size(6, 1)):
                    requests.launch([Feed(slot) for slot in range(rows)])
                requests.finish()
            runner.graphs = kept
            outputs.append([(requests.outputs[slot], requests.logprobs[slot]) for slot in range(rows)])
        report.check(f"{rows} rows: graphs and single kernels come to the same bits", outputs[0] == outputs[1])


def _nothing_is_allocated(
    report: Report, requests: Requests, device: Device, prompts: Mapping[int, Sequence[int]]
) -> None:
    """By steps of shapes that have been there: torch keeps what it was given. For a new block of either memory CUDA may
    wait for all that runs, and no debug mode tells."""
    if device.dry:
        return

    def asked() -> tuple[int, int]:
        return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]

    before = asked()
    requests.serve(prompts, 256, 48)
    more = [after - was for after, was in zip(asked(), before)]
    note = f"{more[0]} blocks on the card, {more[1]} pinned"
    report.check("steps of known shapes ask CUDA for no memory", not any(more), note)


def _windows(report: Report, config: ModelConfig, device: Device, prompts: Mapping[int, Sequence[int]]) -> None:
    """Every other layer looks at a window, and is in a group of its own."""
    odd = tuple(range(1, config.layers, 2))
    config = msgspec.structs.replace(config, window_tokens=device.size(300, 8), window_layers=odd)
    chunk, outputs = device.size(256, 16), device.size(48, 3)
    ids = _by_torch(config, device, "float32").serve(prompts, chunk, outputs)
    requests, _ = _on_device(config, device, "float32")
    with no_waits(device):
        found = requests.serve(prompts, chunk, outputs)
    same = sum(found[slot] == ids[slot] for slot in ids)
    report.check("float32, windows: greedy ids are those of torch's layers", same == len(ids), f"{same} of {len(ids)}")


def _copies(report: Report, config: ModelConfig, device: Device) -> None:
    """A prompt's pages go to the host beside steps, and come back for another request, layer by layer."""
    count = device.size(40, 2)
    prompt = np.random.default_rng(7).integers(0, config.vocab_size, 16 * count + 3).tolist()
    # Of float32.
    pages, slot_bytes = SLOTS * config.context_tokens // 16, 2 * page_bytes(config)
    start = msgspec.structs.replace(_start(config, device, "float32"), host_slot_bytes=slot_bytes)
    memory, ring = shared_ring(start)
    host = mmap.mmap(-1, count * slot_bytes)
    late = _late_streams() if device.dry else None
    backend = RandomBackend(config, start, late.streams if late else None)
    with torch.inference_mode():
        runner = made(backend, start, pages, memory, host)[0].runner
    requests = Requests(runner, ring, pages)
    with no_waits(device):
        requests.begin(0)
        requests.launch([Feed(0, prompt[: 16 * count], sample=False)])
        with torch.inference_mode():
            backup = runner.back_up(Backup(1, 0, requests.pages_of(0), list(range(count))))
        requests.launch([Feed(0, prompt[16 * count :])])
        while not backup.done.query():
            pass
        loads = list(enumerate(requests.begin(1, 16 * count)))
        requests.launch([Feed(0), Feed(1, prompt[16 * count :])], loads)
        for _ in range(device.size(8, 1)):
            requests.launch([Feed(0), Feed(1)])
        requests.finish()
    drawn = len(requests.outputs[1])
    same = requests.outputs[0][:drawn] == requests.outputs[1]
    report.check("float32: what came back from the host comes to the same ids", same, f"{drawn} of them")
    if late is not None:
        conflicts = late.accesses.conflicts
        report.check("no copy is too early either", not conflicts, "; ".join(conflicts[:3]))
        late.__exit__(None, None, None)


def _bfloat16(
    report: Report,
    config: ModelConfig,
    device: Device,
    prompts: Mapping[int, Sequence[int]],
    ids: Mapping[int, Sequence[int]],
) -> None:
    """As near to float32 as torch's layers in bfloat16 are: log-probabilities of the same texts."""
    texts = {slot: [*prompts[slot], *ids[slot]][-device.size(256, 10) :] for slot in prompts}
    exact = _scored(_by_torch(config, device, "float32"), texts)
    theirs = _scored(_by_torch(config, device, "bfloat16"), texts)
    requests, _ = _on_device(config, device, "bfloat16")
    with no_waits(device):
        ours = _scored(requests, texts)
    our_error, their_error = np.abs(ours - exact).mean(), np.abs(theirs - exact).mean()
    note = f"apart from float32 by {our_error:.4f} in the mean, torch's layers by {their_error:.4f}"
    report.check("bfloat16: as near to float32 as torch's layers", bool(our_error < 2 * their_error + 1e-3), note)


def _scored(requests: Requests, texts: Mapping[int, Sequence[int]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    for slot, text in texts.items():
        requests.begin(slot)
        wants = {at: text[at + 1] for at in range(len(text) - 1)}
        requests.launch([Feed(slot, text, sample=False, wants=wants)])
    requests.finish()
    return np.array(requests.wanted)


def _default_model(report: Report, file: Path, device: Device) -> None:
    """The golden ids that the CPU's tests hold it to."""
    cases = json.loads(GOLDEN.read_text())["cases"]
    if file.name != json.loads(GOLDEN.read_text())["model"]:
        report.check("the default model", False, f"{file.name} is not the file that the golden ids are of")
        return
    from headrace.ops.models.architectures import read_config
    from headrace.ops.weights.files import open_model_file

    with open_model_file(file) as opened:
        config = read_config(opened)
    start = start_of(config, device.dry, "float32", SLOTS, 1024, 2048)
    start = msgspec.structs.replace(start, model_path=str(file))
    memory, ring = shared_ring(start)
    with torch.inference_mode():
        runner = made(CudaBackend(start, lambda reply: None, None), start, 512, memory)[0].runner
    requests = Requests(runner, ring, 512)
    same = 0
    for begin in range(0, len(cases), SLOTS):
        some = cases[begin : begin + SLOTS]
        found = requests.serve({slot: case["prompt_ids"] for slot, case in enumerate(some)}, 64, 64)
        same += sum(found[slot] == case["greedy_ids"] for slot, case in enumerate(some))
    report.check("float32: golden ids of the default model", same == len(cases), f"{same} of {len(cases)} prompts")
