"""From settings to a running server: bind, read the header, plan the memory, start the worker, serve.

Order is for whoever waits. The port comes first, so that a busy one fails before anything is loaded; then the header
(40 ms), so that a model that can't run, or doesn't fit, is refused before a process is started; then the worker, which
imports torch for a second, while this process builds the tokenizer beside it.

A model that must be downloaded takes minutes, in which nobody would answer at a port that is listened on: probes would
hang. So the port is tried, given back for the download, in which probes are refused, and then taken for good. Should
another program have taken it meanwhile, that is the same sentence as at the start, and the model is cached.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from rich.console import Console

from headrace.kvcache.storage.agent_process import AgentProcess
from headrace.ops.models.architectures import read_config
from headrace.ops.models.config import ModelConfig
from headrace.ops.models.keys import UnsupportedModel
from headrace.ops.weights.files import ModelFile, open_model_file
from headrace.ops.wire import GroupShape, RingGeometry, Start
from headrace.sched.batch import max_batch_bytes
from headrace.sched.engine import Engine
from headrace.sched.executors.protocol import DeviceUnavailable
from headrace.sched.executors.worker_process import WorkerProcess
from headrace.sched.options import EngineOptions
from headrace.server.api import Api, ApiSettings, Priorities
from headrace.server.body import most_body_bytes
from headrace.server.card import Card, NoCard, read_card
from headrace.server.chat import own_template
from headrace.server.config import BadSetting, Settings
from headrace.server.fingerprint import model_fingerprint
from headrace.server.grammar_process import GrammarProcess
from headrace.server.hardware import Hardware, read_hardware
from headrace.server.host_pool import HostPool
from headrace.server.hub import fetch_from_hub
from headrace.server.lifecycle import CannotListen, LoadedText, bind, run_server
from headrace.server.models import NotCached, OnHub, about, fetch_model, hub_model, resolve
from headrace.server.models_cli import shown_progress
from headrace.server.salt_key import salt_key
from headrace.server.sampling_defaults import SamplingDefaults, sampling_defaults
from headrace.server.sizing import DoesNotFit, MemoryPlan, memory_table, plan_memory
from headrace.server.step_log import StepLog
from headrace.server.text import TextService
from headrace.server.tiering import TierPlan, check_tiers, plan_tiers
from headrace.server.tokenizer import BadTokenizer, check_vocabulary

_log: Final = logging.getLogger("headrace.server")

NO_TIERS: Final = TierPlan()
RING_SLOTS: Final = 3
"""Two steps in flight and one being prepared."""


def serve(settings: Settings) -> int:
    """Serve until a signal; the process's exit code.

    Raises BadSetting, ModelProblem, BadModelFile, UnsupportedModel where the settings, the model and the machine don't
    go together.
    """
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    check_tiers(settings)
    try:
        sock, path = port_and_model(settings)
    except CannotListen as problem:
        print(f"headrace: {problem}", file=sys.stderr)
        return 1
    with sock:
        hardware = with_card(read_hardware(), settings)
        file = open_model_file(path)
        try:
            model = read_config(file)
            check_tokenizer(file, path)
            plan = plan_memory(model, settings, hardware)
            quantization, dot = settings.quantization, hardware.dot
            fingerprint = model_fingerprint(file, plan.layout, plan.dtype, quantization, plan.kernels, dot)
            tiers = plan_tiers(settings, plan, hardware, fingerprint)
            Console(stderr=True).print(memory_table(model, plan, hardware, tiers.host_bytes, tiers.disk))
            options = engine_options(settings, path, model, plan, fingerprint, tiers, dot)
            template = chat_template(settings, file)
            defaults = sampling_defaults(file, settings.sampling_defaults)
        finally:
            file.close()
        api = api_settings(settings, plan, tiers, defaults)
        _tell_defaults(defaults)
        # Before anybody waits: 37 ms for what the imports have left.
        gc.collect()
        gc.freeze()
        return uvloop.run(_serve(sock, settings, path, options, api, template))


def with_card(hardware: Hardware, settings: Settings, look: Callable[[], Card] = read_card) -> Hardware:
    """The machine with its card, if one may be used."""
    if settings.device == "cpu":
        return hardware
    try:
        return msgspec.structs.replace(hardware, card=look())
    except NoCard as problem:
        if settings.device == "auto" and "there is a card" in str(problem):
            _log.warning("the model runs on the CPU: %s", problem)
        return msgspec.structs.replace(hardware, no_card=str(problem))


def port_and_model(settings: Settings) -> tuple[socket.socket, Path]:
    """A listening socket and the model's file or folder, fetched if it is known by name, or to the Hugging Face Hub.

    Raises CannotListen, ModelProblem.
    """
    sock = bind(settings.host, settings.port)
    try:
        return sock, resolve(settings.model_path, settings.cache)
    except (NotCached, OnHub):
        sock.close()
    except BaseException:
        sock.close()
        raise
    path = _fetched(settings)
    return bind(settings.host, settings.port), path


def _fetched(settings: Settings) -> Path:
    hub = hub_model(settings.model_path)
    with shown_progress(sys.stderr, about(settings.model_path) if hub is None else "") as progress:
        if hub is not None:
            return fetch_from_hub(hub, progress)
        return fetch_model(settings.model_path, settings.cache, progress)


def check_tokenizer(file: ModelFile, path: Path) -> None:
    """Raises UnsupportedModel: a vocabulary that can't be used would else be found when the worker has been started."""
    try:
        check_vocabulary(file)
    except BadTokenizer as error:
        raise UnsupportedModel(f"{str(path)!r} can't be served: {error}") from None


def engine_options(
    settings: Settings,
    path: Path,
    model: ModelConfig,
    plan: MemoryPlan,
    fingerprint: bytes,
    tiers: TierPlan = NO_TIERS,
    dot: str = "",
) -> EngineOptions:
    """What the engine and the worker are told: the plan, in their words. `dot`: `Start.dot`."""
    layout, slots, chunk = plan.layout, plan.max_running_requests, plan.max_chunk_tokens
    room = max_batch_bytes(slots, plan.max_context_tokens, chunk, layout.page_tokens, len(layout.groups))
    start = Start(
        model_path=str(path),
        dtype=plan.dtype,
        quantization=settings.quantization,
        threads=plan.cpu_threads,
        max_slots=slots,
        max_context_tokens=plan.max_context_tokens,
        page_tokens=layout.page_tokens,
        ring=RingGeometry(RING_SLOTS, room, slots, chunk, model.vocab_size),
        groups=[
            GroupShape(group.kind, group.window_tokens, list(group.layers), group.kv_heads, group.head_dim)
            for group in layout.groups
        ],
        host_slot_bytes=tiers.slot_bytes,
        window_areas=tiers.window_areas,
        kernels=plan.kernels,
        device=plan.device,
        kernel_cache=str(settings.cache / "kernels"),
        pinned=True,
        dot=dot if plan.kernels == "compiled" else "",
    )
    return EngineOptions(
        layout=layout,
        start=start,
        num_pages=list(plan.num_pages),
        fingerprint=fingerprint,
        max_chunk_tokens=chunk,
        prefill_tokens=plan.prefill_tokens,
        warm_up=not settings.skip_server_warmup,
        overlap=not settings.disable_overlap_schedule,
        reuse=not settings.disable_radix_cache,
        host_pages=tiers.host_pages,
        window_host_pages=[area.pages for area in tiers.window_areas],
        salt_key=salt_key(settings.cache) if tiers.storage is not None else b"",
        page_hash=settings.page_hash,
        write_policy=tiers.write_policy,
        storage=tiers.storage,
        storage_limits=tiers.limits,
        prefetch=tiers.prefetch,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=plan.max_queued_tokens,
        schedule_policy=settings.schedule_policy,
        preempt_above=settings.preempt_above,
        target_itl_ms=settings.target_itl_ms or 0.0,
        conservativeness=settings.schedule_conservativeness,
        step_timeout_s=settings.watchdog_timeout,
    )


def chat_template(settings: Settings, file: ModelFile) -> str | None:
    """The source of the chat template: --chat-template, else the model's own, if it has one. Raises BadSetting."""
    if settings.chat_template is not None:
        path = Path(settings.chat_template)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadSetting(
                f"--chat-template {path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}. "
                "Give a Jinja file, saved as UTF-8."
            ) from None
        except OSError as error:
            raise BadSetting(f"--chat-template {path} can't be read: {error.strerror}. Give a readable file.") from None
    return own_template(file)


async def _serve(
    sock: socket.socket,
    settings: Settings,
    path: Path,
    options: EngineOptions,
    api_settings: ApiSettings,
    template: str | None,
) -> int:
    try:
        start = options.start
        host_bytes = options.host_pages * start.host_slot_bytes
        host_bytes += sum(area.pages * area.slot_bytes for area in start.window_areas)
        host = HostPool(host_bytes) if host_bytes else None
    except OSError as error:
        raise DoesNotFit(f"The host tier's memory can't be had ({error}): give a smaller --hicache-size.") from error
    descriptor = host.descriptor if host is not None else None
    worker_begun = asyncio.Event()

    async def connect() -> WorkerProcess:
        try:
            return WorkerProcess(options.start.ring, options.start.threads, descriptor)
        except OSError as error:
            raise DeviceUnavailable(f"the device worker can't be started: {error}") from error
        finally:
            worker_begun.set()

    async def connect_storage() -> AgentProcess:
        assert descriptor is not None
        return AgentProcess(descriptor)

    async def connect_grammar() -> GrammarProcess:
        return GrammarProcess(path)

    async def load_text() -> LoadedText:
        # The two load side by side: this takes 0.2 s, in which the worker's process imports torch.
        await worker_begun.wait()
        return LoadedText(TextService.open(path, template if settings.chat_template else None), template)

    engine = Engine(options, connect, lambda deltas: None, connect_storage, connect_grammar)
    step_log = StepLog(Path(settings.record_steps)) if settings.record_steps is not None else None
    if step_log is not None:
        engine.step_listener = step_log.record
    try:
        return await run_server(
            sock,
            Api(api_settings, engine),
            load_text,
            drain_timeout_s=settings.drain_timeout_s,
            tell=lambda line: print(line, flush=True),
        )
    finally:
        if step_log is not None:
            step_log.close()


def _priorities(settings: Settings) -> Priorities:
    if settings.enable_priority_scheduling:
        return "low first" if settings.schedule_low_priority_values_first else "high first"
    return "refused" if settings.abort_on_priority_when_disabled else "ignored"


def _tell_defaults(defaults: SamplingDefaults) -> None:
    """Answers that are drawn otherwise than OpenAI's API says would else be a riddle."""
    openai = msgspec.structs.asdict(SamplingDefaults())
    said = [f"{name} {value:g}" for name, value in msgspec.structs.asdict(defaults).items() if value != openai[name]]
    if said:
        _log.info("requests that don't say otherwise get the model's %s (--sampling-defaults)", ", ".join(said))


def api_settings(settings: Settings, plan: MemoryPlan, tiers: TierPlan, defaults: SamplingDefaults) -> ApiSettings:
    """What the API is told: the settings, and what was decided where they left it open."""
    decided: dict[str, object] = {"device": plan.device, "dtype": plan.dtype, "cpu_threads": plan.cpu_threads}
    decided |= {"cpu_kernels": plan.kernels} if plan.device == "cpu" else {"card_bytes": plan.card_bytes}
    decided |= {"max_total_tokens": plan.pool_tokens, "host_tier_bytes": tiers.host_bytes}
    decided |= {"cache_model": tiers.storage.model.hex() if tiers.storage is not None else None}
    decided |= {"default_sampling_params": msgspec.structs.asdict(defaults)}
    return ApiSettings(
        max_body_bytes=most_body_bytes(plan.max_queued_tokens),
        model_name=settings.model_name,
        host=settings.host,
        max_running_requests=plan.max_running_requests,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=plan.max_queued_tokens,
        priorities=_priorities(settings),
        sampling_defaults=defaults,
        api_keys=(settings.api_key,) if settings.api_key else (),
        admin_api_key=settings.admin_api_key,
        request_timeout_s=settings.request_timeout_s,
        queue_timeout_s=settings.queue_timeout_s,
        storage_backend=tiers.storage.backend if tiers.storage is not None else None,
        created_unix_s=int(time.time()),
        public=settings.public() | decided,
    )
