"""An engine that says exactly what a test wrote down, and a server around it.

No model, no pages: a request's ids are planned when it is submitted, and come one a step. Steps run by themselves, or
one by one where a test holds them (`engine.hold()`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import openai

from headrace.kvcache.cache import KvCache
from headrace.kvcache.identity import namespace
from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.ops.wire import MAX_LOGPROBS
from headrace.sched.cache_control import CacheControl
from headrace.sched.device import EngineFailed
from headrace.sched.grammar import Grammar
from headrace.sched.messages import (
    WAIT_CAUSES,
    EngineStatus,
    Finished,
    FinishReason,
    Flushed,
    Phase,
    PromptLogprobs,
    Started,
    StepDeltas,
    Submit,
    WaitCause,
)
from headrace.server.api import Api, ApiSettings
from headrace.server.chat import ChatTemplate, TextModel
from headrace.server.lifecycle import LoadedText, bind, run_server
from headrace.server.text import TextService
from headrace.server.tokenizer import Tokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS, START, END = 256, 257, 258
"""Ids of the control tokens: 256 bytes stand before them."""
MODEL = "tiny"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 4096


def make_tokenizer() -> Tokenizer:
    """Every byte is a token, so that every character but ASCII comes in several."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [256 + number for number in range(256 - len(printable))]
    return Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": [*map(chr, printable + others), *CONTROL],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * len(CONTROL),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": END,
            "tokenizer.ggml.bos_token_id": START,
        }
    )


TOKENIZER = make_tokenizer()


def ids_of(text: str) -> list[int]:
    return [int(id) for id in TOKENIZER.encode(text)]


def make_text(chat_template: str | None = CHATML) -> TextService:
    template = None if chat_template is None else ChatTemplate(chat_template, TOKENIZER)
    return TextService(TextModel(TOKENIZER, template), "no-model-file", chat_template)


Plan = Callable[[Submit], Sequence[int]]


def saying(text: str, *then: int) -> Plan:
    """Every request gets this text, and these ids after it."""
    return lambda submit: [*ids_of(text), *then]


@dataclass
class Run:
    """One request in the engine."""

    submit: Submit
    plan: list[int]
    given: int = 0


@dataclass
class ScriptedEngine:
    """Implements `EngineApi`."""

    plan: Plan = field(default_factory=lambda: saying("hello", END))
    phase: Phase = "ready"
    message: str = ""
    progress: float = 1.0
    cached_tokens: int = 0
    last_step_age_ms: float = 0.0
    context_tokens: int = CONTEXT_TOKENS
    pages: int = 2 * CONTEXT_TOKENS // 16
    refuse: Exception | None = None
    """What `submit` raises."""
    refuse_grammar: Exception | None = None
    """What `check_grammar` raises."""
    grammars: list[Grammar] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    concludes: list[tuple[int, int]] = field(default_factory=list)
    running: dict[int, Run] = field(default_factory=dict)
    steps: int = 0
    flushes: int = 0
    writing: bool = False
    """Cached pages are on their way down."""
    worker_pid: int = 0
    held: bool = False
    ended: bool = False
    """`run` has been cancelled or has failed."""

    def __post_init__(self) -> None:
        self.sink: Callable[[StepDeltas], None] = lambda deltas: None
        self._scheduled = False
        self._failure: str | None = None
        self._failed = asyncio.Event()
        layout = KvLayout(16, (LayerGroup("full", 0, (0,), 1, 8, 1),))
        self.control = CacheControl(
            KvCache(layout, [64]), lambda salt: namespace(b"script", "", salt), "xxh3", lambda: self.context_tokens
        )
        """Of a cache that stays empty."""

    # What the server calls ----------------------------------------------------------------------------------

    async def check_grammar(self, grammar: Grammar) -> None:
        self.grammars.append(grammar)
        if self.refuse_grammar is not None:
            raise self.refuse_grammar

    def submit(self, submit: Submit) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.submits.append(submit)
        self.running[submit.request] = Run(submit, list(self.plan(submit)))
        self._schedule()

    def abort(self, request: int) -> None:
        self.aborts.append(request)
        if self.running.pop(request, None) is not None:
            self._tell([Finished(request, "abort", 0)])

    def conclude(self, request: int, n_tokens: int) -> None:
        self.concludes.append((request, n_tokens))
        if self.running.pop(request, None) is not None:
            self._tell([Finished(request, "stop", n_tokens)])

    def flush_cache(self, device: bool = True, host: bool = True, most_pages: int = 1 << 40) -> Flushed:
        self.flushes += 1
        dropped, self.cached_tokens = self.cached_tokens, 0
        return Flushed(dropped_pages=dropped, pinned_pages=len(self.running))

    def status(self) -> EngineStatus:
        fields: dict[str, Any] = {
            **dict.fromkeys(EngineStatus.__struct_fields__, 0),
            "phase": self.phase,
            "message": self.message,
            "progress": self.progress,
            "device_name": "script",
            "worker_pid": self.worker_pid,
            "numerics": "",
            "running": len(self.running),
            "max_context_tokens": self.context_tokens,
            "page_tokens": 16,
            "pages_total": self.pages,
            "pages_free": self.pages,
            "last_step_age_ms": self.last_step_age_ms,
            "steps": self.steps,
            "waited_ms": dict.fromkeys(WAIT_CAUSES, 0.0),
            "window_groups": [],
        }
        return EngineStatus(**fields)

    async def run(self) -> None:
        try:
            await self._failed.wait()
            self.phase, self.message = "failed", self._failure or ""
            raise EngineFailed(self._failure)
        finally:
            self.ended = True

    # What tests call ----------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """The engine can't go on."""
        self._failure = message
        self._failed.set()

    def hold(self) -> None:
        """Steps run only by `step` from now on."""
        self.held = True

    def release(self) -> None:
        self.held = False
        self._schedule()

    def end(self, request: int, reason: FinishReason, message: str = "") -> None:
        """End a request from the engine's side."""
        run = self.running.pop(request)
        self._tell([Finished(request, reason, run.given, message)])

    def step(self, ids_each: int = 1) -> None:
        """One step: the next ids of every running request."""
        self.steps += 1
        requests, offsets, ids = [], [0], []
        started: list[Started] = []
        finished: list[Finished] = []
        prompts: list[PromptLogprobs] = []
        for request, run in list(self.running.items()):
            if run.given == 0:
                cached = min(self.cached_tokens, len(run.submit.prompt_ids) - 1)
                started.append(start_of(request, cached, {"slot": 1.0, "prefill": 2.0}))
                if run.submit.sampling.prompt_logprobs >= 0 and len(run.submit.prompt_ids) > 1:
                    prompts.append(prompt_logprobs_of(run.submit))
            for _ in range(ids_each):
                id, end = self._next(run)
                ids.append(id)
                if end is not None:
                    finished.append(end)
                    del self.running[request]
                    break
            requests.append(request)
            offsets.append(len(ids))
        rows = np.array(ids, np.int32)
        self.sink(
            StepDeltas(
                self.steps,
                np.array(requests, np.int64),
                np.array(offsets, np.int32),
                rows,
                logprob_of(rows),
                alternatives_of(rows),
                np.tile(-np.arange(1, MAX_LOGPROBS + 1, dtype=np.float32), (len(rows), 1)),
                started,
                finished,
                prompts,
            )
        )

    # ----------------------------------------------------------------------------------------------------------

    def _next(self, run: Run) -> tuple[int, Finished | None]:
        sampling, request = run.submit.sampling, run.submit.request
        id = run.plan[run.given % len(run.plan)]
        run.given += 1
        if id in sampling.stop_ids and run.given > sampling.min_tokens:
            return id, Finished(request, "stop", run.given, matched_stop_id=id)
        if run.given == sampling.max_tokens:
            return id, Finished(request, "length", run.given)
        return id, None

    def _schedule(self) -> None:
        if not self._scheduled and not self.held and self.running:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self.running and not self.held:
            self.step()
            self._schedule()

    def _tell(self, finished: list[Finished]) -> None:
        none = np.zeros(0, np.int32)
        self.sink(
            StepDeltas(-1, none.astype(np.int64), np.zeros(1, np.int32), none, None, None, None, [], finished, [])
        )


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; looked at whenever the loop has turned."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (anything may make it hold)
            await asyncio.sleep(0)


def start_of(request: int, cached: int, waited_ms: dict[WaitCause, float]) -> Started:
    """A start whose cached tokens were all on the device."""
    parts = dict.fromkeys(WAIT_CAUSES, 0.0) | waited_ms
    return Started(request, cached, cached, 0, 0, 1, 1000, parts, 12.5, "guessed")


def logprob_of(ids: Any) -> Any:
    """The scripted logprob of an id: -id / 1000."""
    return (-ids / 1000).astype(np.float32)


def alternatives_of(ids: Any) -> Any:
    """The best alternatives of an id: itself, then the ids from 1 on."""
    return np.concatenate([ids[:, None], np.tile(np.arange(1, MAX_LOGPROBS, dtype=np.int32), (len(ids), 1))], 1)


def prompt_logprobs_of(submit: Submit) -> PromptLogprobs:
    ids = submit.prompt_ids[1:]
    tops = np.tile(-np.arange(1, MAX_LOGPROBS + 1, dtype=np.float32), (len(ids), 1))
    return PromptLogprobs(submit.request, 1, logprob_of(ids), alternatives_of(ids), tops)


@dataclass
class Served:
    """A server that runs in the test's own loop."""

    engine: ScriptedEngine
    api: Api
    url: str
    port: int
    told: list[str]
    task: asyncio.Task[int]

    async def raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own; all that comes back until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer

    async def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """One request; status, headers (lower case) and the JSON or text of the answer."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.raw(request_bytes(method, path, data, headers))
        status, fields, payload = parse_answer(answer)
        if fields.get("content-type", "").startswith("application/json"):
            return status, fields, json.loads(payload) if payload else None
        return status, fields, payload.decode()

    async def events(self, path: str, body: object) -> list[Any]:
        """The `data:` events of a stream: JSON, and "[DONE]"."""
        status, _, text = await self.ask("POST", path, body)
        assert status == 200, text
        return events_of(text)


def openai_client(served: Served) -> openai.AsyncOpenAI:
    """OpenAI's own client; it would repeat requests that fail."""
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def request_bytes(method: str, path: str, data: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    fields = {
        "Host": "127.0.0.1",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **(headers or {}),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


def parse_answer(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, payload = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if fields.get("transfer-encoding") == "chunked":
        payload = dechunk(payload)
    return int(first.split()[1]), fields, payload


def dechunk(payload: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < len(payload):
        end = payload.index(b"\r\n", at)
        length = int(payload[at:end], 16)
        if length == 0:
            assert payload[end:] == b"\r\n\r\n", "nothing follows the last chunk"
            return b"".join(parts)
        parts.append(payload[end + 2 : end + 2 + length])
        at = end + 2 + length + 2
    raise AssertionError("the answer ends without its last chunk")


def events_of(text: str) -> list[Any]:
    events: list[Any] = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


@asynccontextmanager
async def serving(
    engine: ScriptedEngine,
    text: TextService | None = None,
    drain_timeout_s: float = 5.0,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve this engine on a free port until the block ends."""
    text = text or make_text()
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    fields = {"model_name": MODEL, "host": "127.0.0.1", "max_running_requests": 8, **settings}
    api = Api(msgspec.convert(fields, ApiSettings), engine)
    told: list[str] = []

    async def load_text() -> LoadedText:
        return LoadedText(text, CHATML)

    task = asyncio.get_running_loop().create_task(
        run_server(sock, api, load_text, drain_timeout_s=drain_timeout_s, tell=told.append, handle_signals=False)
    )
    try:
        if engine.phase == "ready":
            await until(lambda: bool(told) or task.done())
        yield Served(engine, api, f"http://127.0.0.1:{port}", port, told, task)
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sock.close()
