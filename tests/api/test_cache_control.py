"""`/flush_cache` and `/cache/…` over the real engine with all three tiers; the device is the oracle."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from api.scripted import CHATML, MODEL, TOKENIZER, events_of, ids_of, make_text, parse_answer, request_bytes, until

from headrace.kvcache.layout import KvLayout, LayerGroup
from headrace.kvcache.prefetch import PrefetchOptions
from headrace.kvcache.storage.lanes import InlineLanes
from headrace.kvcache.storage.memory import MemoryStore
from headrace.kvcache.storage.protocol import OpenStore, Reply, command_decoder, encoder
from headrace.kvcache.storage.service import StorageService
from headrace.ops.wire import BatchRing, Command, GroupShape, RingGeometry, Start
from headrace.sched.batch import max_batch_bytes
from headrace.sched.engine import Engine
from headrace.sched.executors.local import LocalConnection
from headrace.sched.executors.oracle import OracleDevice, expected
from headrace.sched.messages import Flushed
from headrace.sched.options import EngineOptions
from headrace.server.api import Api, ApiSettings
from headrace.server.lifecycle import LoadedText, bind, run_server

VOCAB = TOKENIZER.vocab_size
SLOTS, CONTEXT_TOKENS, PAGE_TOKENS, CHUNK, PAGES, HOST_PAGES = 4, 256, 4, 32, 256, 512
TEXT = "a prompt that is some pages long, and cached"
WHOLE = len(TEXT) // PAGE_TOKENS * PAGE_TOKENS


class _LocalAgent:
    """The storage service in the test's loop, one turn a message."""

    def __init__(self, host_pool: bytearray) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = InlineLanes()
        store = MemoryStore(64 << 20)
        self._service = StorageService(
            self._reply, memoryview(host_pool), lambda command: (store, self._lanes), lambda: self._loop.time() * 1e3
        )
        self._on_message: Callable[[bytes], None] | None = None
        self.lose: Callable[[str], None] = lambda reason: None
        """As when the process ends."""
        self.closed = False

    @property
    def transport(self) -> _LocalAgent:
        return self

    def open(self, on_message: Callable[[bytes], None], on_close: Callable[[str], None]) -> None:
        self._on_message, self.lose = on_message, on_close

    def send(self, message: bytes) -> None:
        self._loop.call_soon(self._run, message)

    def close(self) -> None:
        self.closed = True

    def _run(self, message: bytes) -> None:
        if not self.closed:
            self._service.handle(command_decoder.decode(message))
            self._lanes.deliver()
            if self._service.finished:
                self._loop.call_soon(self.lose, "the storage agent ended")

    def _reply(self, reply: Reply) -> None:
        self._loop.call_soon(self._deliver, encoder.encode(reply))

    def _deliver(self, message: bytes) -> None:
        if not self.closed:
            assert self._on_message is not None
            self._on_message(message)


def options() -> EngineOptions:
    ring = RingGeometry(3, max_batch_bytes(SLOTS, CONTEXT_TOKENS, CHUNK, PAGE_TOKENS, 1), SLOTS, CHUNK, VOCAB)
    layout = KvLayout(PAGE_TOKENS, (LayerGroup("full", 0, (0,), 1, 8, 1),))
    slot_bytes = layout.host_slot_bytes(0)
    start = Start(
        model_path="",
        dtype="float32",
        quantization="none",
        threads=1,
        max_slots=SLOTS,
        max_context_tokens=CONTEXT_TOKENS,
        page_tokens=PAGE_TOKENS,
        ring=ring,
        groups=[GroupShape("full", 0, [0], 1, 8)],
        host_slot_bytes=slot_bytes,
    )
    storage = OpenStore(
        backend="memory",
        capacity_bytes=64 << 20,
        page_tokens=PAGE_TOKENS,
        slot_bytes=[slot_bytes],
        host_offsets=[0],
        host_pages=[HOST_PAGES],
        model=bytes(16),
    )
    return EngineOptions(
        layout=layout,
        start=start,
        num_pages=[PAGES],
        fingerprint=b"oracle",
        max_chunk_tokens=CHUNK,
        prefill_tokens=CHUNK,
        host_pages=HOST_PAGES,
        storage=storage,
        prefetch=PrefetchOptions("wait_complete", threshold_tokens=4),
    )


class Server:
    """A whole server but for the model, in the test's loop."""

    def __init__(self, engine: Engine, api: Api, port: int) -> None:
        self.engine, self.api, self.port = engine, api, port
        self.agent: _LocalAgent | None = None

    async def ask(self, method: str, path: str, body: object = None, key: str = "") -> tuple[int, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        writer.write(request_bytes(method, path, b"" if body is None else json.dumps(body).encode(), headers))
        async with asyncio.timeout(30):
            status, _, payload = parse_answer(await reader.read())
        writer.close()
        return status, payload.decode() if path == "/metrics" else json.loads(payload)

    async def good(self, method: str, path: str, body: object = None, key: str = "") -> Any:
        status, answer = await self.ask(method, path, body, key)
        assert status == 200, answer
        return answer

    async def run(self, text: str = TEXT, salt: str = "", key: str = "") -> dict[str, int]:
        """Send a prompt, check its ids; where its cached tokens came from."""
        body: dict[str, Any] = {"input_ids": ids_of(text), "return_cached_tokens_details": True}
        body["sampling_params"] = {"max_new_tokens": 3, "ignore_eos": True, "seed": 1}
        if salt:
            body["cache_salt"] = salt
        answer = await self.good("POST", "/generate", body, key)
        assert answer["output_ids"] == expected(ids_of(text), 3, VOCAB, 1)
        await until(lambda: not (self.engine.status().running or self.engine.in_flight or self.engine.writing))
        self.engine.check_integrity()
        found: dict[str, int] = answer["meta_info"]["cached_tokens_details"]
        return {tier: found[tier] for tier in ("device", "host", "storage")}

    async def lookup(self, text: str = TEXT, salt: str = "", key: str = "") -> tuple[int, int, int]:
        body = {"input_ids": ids_of(text), "cache_salt": salt}
        found = await self.good("POST", "/cache/lookup", body, key)
        return found["device"], found["host"], found["storage"]


@asynccontextmanager
async def serving(engine_options: EngineOptions | None = None, **settings: Any) -> AsyncIterator[Server]:
    engine_options = engine_options or options()
    ring = BatchRing(bytearray(engine_options.start.ring.size_bytes), engine_options.start.ring)
    host_pool = bytearray(HOST_PAGES * engine_options.start.host_slot_bytes)

    def device(ring: BatchRing, reply: Any) -> Any:
        oracle = OracleDevice(ring, reply, VOCAB, (), host_pool)

        def handle(command: Command) -> None:
            oracle.handle(command)

        return handle

    async def connect() -> LocalConnection:
        return LocalConnection(ring, device)

    agents: list[_LocalAgent] = []

    async def connect_storage() -> _LocalAgent:
        agents.append(_LocalAgent(host_pool))
        return agents[-1]

    async def load_text() -> LoadedText:
        return LoadedText(make_text(), CHATML)

    engine = Engine(engine_options, connect, lambda deltas: None, connect_storage)
    fields = {"model_name": MODEL, "host": "127.0.0.1", "max_running_requests": SLOTS, **settings}
    api = Api(msgspec.convert(fields, ApiSettings), engine)
    sock = bind("127.0.0.1", 0)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(line: str) -> None:
        if not ready.done():
            ready.set_result(line)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run_server(sock, api, load_text, drain_timeout_s=5, tell=tell, handle_signals=False))
        await ready
        if engine_options.storage is not None:
            await until(lambda: engine.status().storage_state == "usable")
        server = Server(engine, api, sock.getsockname()[1])
        server.agent = agents[-1] if agents else None
        yield server
        task.cancel()


async def test_a_lookup_says_what_each_tier_has() -> None:
    async with serving() as server:
        assert await server.lookup() == (0, 0, 0)
        await server.run()
        assert await server.lookup() == (WHOLE, WHOLE, WHOLE)
        assert await server.lookup(TEXT[:20] + "something else") == (20, 20, 20)
        assert await server.lookup(salt="other") == (0, 0, 0)


@pytest.mark.parametrize("body", [{"prompt": TEXT}, {"prompt": ids_of(TEXT)}, {"input_ids": ids_of(TEXT)}])
async def test_a_prompt_is_named_as_in_a_request(body: dict[str, Any]) -> None:
    async with serving() as server:
        await server.good("POST", "/v1/completions", {"prompt": ids_of(TEXT), "max_tokens": 1})
        found = await server.good("POST", "/cache/lookup", {**body, "model": MODEL})
    assert found["prompt_tokens"] >= len(TEXT)
    assert found["device"] == found["cached_tokens"] == (WHOLE if found["prompt_tokens"] == len(TEXT) else 0)


async def test_a_conversation_is_looked_up_by_its_messages() -> None:
    messages = [{"role": "user", "content": TEXT}]
    async with serving() as server:
        await server.good("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        found = await server.good("POST", "/cache/lookup", {"messages": messages})
    assert found["device"] >= found["prompt_tokens"] - PAGE_TOKENS > 0


async def test_without_a_tier_a_flush_drops_device_and_host_and_storage_stays() -> None:
    async with serving() as server:
        await server.run()
        flushed = await server.good("POST", "/flush_cache")
        assert flushed["tiers"] == {
            "device": {"dropped_pages": flushed["dropped_pages"] // 2, "kept_pages": 0},
            "host": {"dropped_pages": flushed["dropped_pages"] // 2, "kept_pages": 0},
        }
        assert await server.lookup() == (0, 0, WHOLE)
        assert (await server.run())["storage"] == (len(TEXT) - 1) // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize(
    ("tier", "left"),
    [
        ("device", (0, WHOLE, WHOLE)),
        ("host", (WHOLE, 0, WHOLE)),
        ("storage", (WHOLE, WHOLE, 0)),
        ("all", (0, 0, 0)),
    ],
)
async def test_a_flush_drops_the_tier_that_it_names(tier: str, left: tuple[int, int, int]) -> None:
    async with serving() as server:
        await server.run()
        flushed = await server.good("POST", f"/flush_cache?tier={tier}")
        assert await server.lookup() == left
        server.engine.check_integrity()
    assert flushed["success"] and flushed["writes_completed"]
    assert all(counts["dropped_pages"] >= WHOLE // PAGE_TOKENS for counts in flushed["tiers"].values())


async def test_a_flush_gives_way_to_the_loop_after_each_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.cache_control.FLUSH_PAGES", 1)
    async with serving() as server:
        await server.run()
        real, slices = server.engine.flush_cache, list[int]()

        def counted(device: bool, host: bool, most_pages: int) -> Flushed:
            flushed = real(device, host, most_pages)
            slices.append(flushed.dropped_pages)
            return flushed

        monkeypatch.setattr(server.engine, "flush_cache", counted)
        flushed = await server.good("POST", "/flush_cache?tier=device")
        assert await server.lookup() == (0, WHOLE, WHOLE)
    assert max(slices) == 1 and sum(slices) == flushed["dropped_pages"] >= WHOLE // PAGE_TOKENS


async def test_a_flush_completes_the_writes_that_read_from_what_it_drops() -> None:
    async with serving() as server:
        body = {"prompt": ids_of(TEXT), "max_tokens": 1}
        await server.good("POST", "/v1/completions", body)
        flushed = await server.good("POST", "/flush_cache?tier=host")
        assert await server.lookup() == (WHOLE, 0, WHOLE)
    assert flushed["writes_completed"] and flushed["tiers"]["host"]["kept_pages"] == 0


async def test_a_warm_up_saves_the_next_request_the_wait_for_storage() -> None:
    async with serving() as server:
        await server.run()
        await server.good("POST", "/flush_cache")
        warmed = await server.good("POST", "/cache/warm", {"input_ids": ids_of(TEXT)})
        assert (warmed["warmed_tokens"], warmed["complete"], warmed["host"]) == (WHOLE, True, WHOLE)
        assert (await server.run())["host"] > 0
        again = await server.good("POST", "/cache/warm", {"input_ids": ids_of(TEXT)})
    assert again["warmed_tokens"] == 0 and again["complete"]


async def test_a_pin_outlives_a_flush_and_is_listed_until_it_is_let_go() -> None:
    async with serving() as server:
        await server.run()
        pin = await server.good("POST", "/cache/pin", {"input_ids": ids_of(TEXT), "ttl_s": 60})
        flushed = await server.good("POST", "/flush_cache?tier=all")
        assert (await server.lookup())[:2] == (WHOLE, WHOLE)
        assert flushed["pins"][0]["id"] == pin["pin_id"] and "pins" in flushed["message"]
        (listed,) = (await server.good("GET", "/server_info"))["cache_pins"]
        assert (listed["id"], listed["tokens"]) == (pin["pin_id"], WHOLE) and 0 < listed["expires_in_s"] <= 60
        server.engine.check_integrity()
        assert await server.good("POST", "/cache/unpin", {"pin_id": pin["pin_id"]}) == {"unpinned": True}
        assert await server.good("POST", "/cache/unpin", {"pin_id": pin["pin_id"]}) == {"unpinned": False}
        assert (await server.good("GET", "/server_info"))["cache_pins"] == []
        await server.good("POST", "/flush_cache")
        assert (await server.lookup())[:2] == (0, 0)


async def test_clearing_a_salt_leaves_other_salts_in_every_tier() -> None:
    async with serving() as server:
        await server.run(salt="mine")
        await server.run(salt="theirs")
        cleared = await server.good("POST", "/cache/clear", {"cache_salt": "mine"})
        assert set(cleared["tiers"]) == {"device", "host", "storage"}
        assert await server.lookup(salt="mine") == (0, 0, 0)
        assert await server.lookup(salt="theirs") == (WHOLE, WHOLE, WHOLE)
        server.engine.check_integrity()


async def test_clearing_a_prompt_leaves_what_branches_off_before_its_end() -> None:
    other = TEXT[:20] + "and goes on in another way"
    async with serving() as server:
        await server.run()
        await server.run(other)
        await server.good("POST", "/cache/clear", {"input_ids": ids_of(TEXT)})
        assert (await server.lookup())[:2] == (20, 20)
        assert (await server.lookup(other))[0] == len(other) // PAGE_TOKENS * PAGE_TOKENS
        server.engine.check_integrity()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/cache/lookup", {}, "Give one of `prompt`, `input_ids` and `messages`"),
        ("/cache/lookup", {"prompt": "a", "input_ids": [1]}, "2 were given"),
        ("/cache/lookup", {"prompt": ["a", "b"]}, "give one"),
        ("/cache/lookup", {"prompt": [1 << 20]}, "the model's ids go from 0"),
        ("/cache/lookup", {"prompt": "a", "salt": "x"}, "unknown field `salt`"),
        ("/cache/lookup", {"prompt": "a", "tenant": "0" * 32}, "admin key"),
        ("/cache/lookup", {"prompt": "a", "model": "other"}, "not served here"),
        ("/cache/warm", {"prompt": "a", "timeout_s": 0}, "timeout_s"),
        ("/cache/pin", {"prompt": "a", "ttl_s": 1e9}, "ttl_s"),
        ("/cache/pin", {"prompt": TEXT}, "send it as a request"),
        ("/cache/unpin", {}, "`pin_id` is missing"),
        ("/cache/clear", {}, "/flush_cache clears everything"),
        ("/cache/clear", {"prompt": TEXT, "tier": "storage"}, "whole salts only"),
        ("/cache/clear", {"prompt": [1, 2]}, "less than a page"),
        ("/cache/clear", {"cache_salt": "", "tier": "tape"}, "tier"),
        ("/flush_cache?tier=tape", None, "device, host, storage, all"),
    ],
)
async def test_what_can_not_be_done_is_refused_with_what_to_change(path: str, body: object, says: str) -> None:
    async with serving() as server:
        status, answer = await server.ask("POST", path, body)
    assert status in (400, 404) and says in answer["error"]["message"], answer


@pytest.mark.parametrize(("path", "body"), [("/flush_cache?tier=storage", None), ("/cache/warm", {"prompt": TEXT})])
async def test_without_a_storage_tier_what_needs_one_says_so(path: str, body: object) -> None:
    async with serving(msgspec.structs.replace(options(), storage=None)) as server:
        status, answer = await server.ask("POST", path, body)
        everything = await server.good("POST", "/flush_cache?tier=all")
    assert status == 400 and "--disk-cache-dir" in answer["error"]["message"]
    assert everything["tiers"]["storage"]["dropped_pages"] == 0


async def test_while_the_agent_is_away_a_warm_up_and_a_deletion_say_so() -> None:
    async with serving() as server:
        await server.run()
        assert server.agent is not None
        server.agent.lose("the storage agent ended")
        statuses = [
            (await server.ask("POST", path, body))
            for path, body in (("/cache/warm", {"prompt": TEXT}), ("/flush_cache?tier=all", None))
        ]
        assert (await server.lookup())[2] == 0
    (warmed, refusal), (flushed, answer) = statuses
    assert warmed == 503 and "the storage agent ended" in refusal["error"]["message"]
    assert flushed == 503 and not answer["success"] and answer["tiers"]["device"]["dropped_pages"] > 0


async def test_b19_storage_is_switched_off_and_on_over_http() -> None:
    path = "/hicache/storage-backend"
    there = {"hicache_storage_backend": "memory", "attached": True, "usable": True}
    gone = {**there, "attached": False, "usable": False}
    async with serving() as server:
        assert there.items() <= (await server.good("GET", path)).items()
        for _ in range(2):
            answer = await server.good("DELETE", path)
            assert gone.items() <= answer.items() and answer["message"] == "Storage is detached."
        await server.run()
        assert await server.lookup() == (WHOLE, WHOLE, 0)
        status, refusal = await server.ask("POST", "/cache/warm", {"prompt": TEXT})
        assert status == 503 and "detached" in refusal["error"]["message"]
        status, refusal = await server.ask("PUT", path, {"hicache_storage_backend": "mooncake"})
        assert status == 400 and "storage backend memory" in refusal["error"]["message"]
        for body in (None, {"hicache_storage_backend": "memory"}):
            assert there.items() <= (await server.good("PUT", path, body)).items()
        text = "said after storage was attached again"
        await server.run(text)
        assert (await server.lookup(text))[2] == len(text) // PAGE_TOKENS * PAGE_TOKENS


async def test_b19_without_a_storage_tier_there_is_nothing_to_switch() -> None:
    async with serving(msgspec.structs.replace(options(), storage=None)) as server:
        for method in ("PUT", "DELETE"):
            status, answer = await server.ask(method, "/hicache/storage-backend")
            assert status == 400 and "--disk-cache-dir" in answer["error"]["message"]
        state = await server.good("GET", "/hicache/storage-backend")
    assert (state["hicache_storage_backend"], state["attached"]) == (None, False)


async def test_each_api_key_sees_its_own_cache_and_the_admin_names_a_tenants() -> None:
    async with serving(api_keys=("one", "two"), admin_api_key="boss") as server:
        await server.run(key="one")
        tenant = hashlib.sha256(b"one").hexdigest()[:32]
        body = {"input_ids": ids_of(TEXT)}
        assert (await server.good("POST", "/cache/lookup", body, "boss"))["device"] == 0
        assert (await server.good("POST", "/cache/lookup", {**body, "tenant": tenant}, "boss"))["device"] == WHOLE
        assert (await server.ask("POST", "/cache/lookup", body, "one"))[0] == 401


async def test_events_come_as_they_happen() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes("GET", "/cache/events"))
        async with asyncio.timeout(20):
            seen = await reader.readuntil(b": keep-alive\n\n")
            await server.run()
            while seen.count(b"storage") < 1:
                seen += await reader.read(1 << 16)
        root = server.engine.namespace("", "")
        writer.close()
        await until(lambda: server.engine.control.events.readers == 0)
    lines = b"".join(line + b"\n\n" for line in seen.split(b"\n") if line.startswith(b"data: "))
    first, *_ = told = events_of(lines.decode())
    assert first["type"] == "stored" and first["tier"] == "device" and first["parent"] == root.hex()
    assert {event["tier"] for event in told} == {"device", "host", "storage"}
    assert [event["seq"] for event in told] == list(range(1, len(told) + 1))
