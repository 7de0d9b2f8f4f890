"""Texts and conversations through the service, with a real worker process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.sched.messages import Overloaded
from headrace.server import text_jobs
from headrace.server.chat import BadChat, Chat, TextModel
from headrace.server.text import INLINE_CHARS, TextService
from headrace.server.text_jobs import TextFailed, TextLimits, TextTimeout
from headrace.server.tokenizer import BadText

LONG = "The quick brown fox, 12 日本語 😀\n" * 2000
VERY_LONG = "0123456789" * 200_000
"""Two seconds' work."""


@pytest.fixture
async def make_service(
    text_model: TextModel, model_path: Path
) -> AsyncIterator[Callable[[TextLimits, str | None], TextService]]:
    services: list[TextService] = []

    def make(limits: TextLimits, chat_template: str | None = None) -> TextService:
        model = text_model if chat_template is None else TextModel.load(model_path, chat_template)
        services.append(TextService(model, model_path, chat_template, limits))
        return services[-1]

    yield make
    for service in services:
        service.close()


MakeService = Callable[..., TextService]


@pytest.fixture
def service(make_service: MakeService) -> TextService:
    return make_service(TextLimits())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event, and each turn of the loop may be it
            await asyncio.sleep(0)


def is_working(service: TextService) -> bool:
    process = service._jobs._process
    return process is not None and process.working in service._jobs._jobs


# ---------------------------------------------------------------------------------------------------------------
# What comes out


async def test_a_short_text_needs_no_worker(service: TextService) -> None:
    assert (await service.encode("Hello world")).tolist() == [19556, 905]
    assert (await service.encode("")).tolist() == []
    assert service.worker_pid is None


async def test_a_short_conversation_needs_no_worker(service: TextService, text_model: TextModel) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    expected = text_model.required_template().encode(Chat(messages))
    assert (await service.encode_chat(messages)).tolist() == expected.tolist()
    assert service.worker_pid is None


async def test_a_long_text_has_the_same_ids_from_the_worker(service: TextService) -> None:
    ids = await service.encode(LONG)
    assert ids.dtype == np.int32
    assert ids.tolist() == service.tokenizer.encode(LONG).tolist()
    assert service.worker_pid is not None


async def test_a_long_conversation_has_the_same_ids_from_the_worker(
    service: TextService, text_model: TextModel
) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": LONG + "<|im_end|>"}]
    messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}] * 200
    for continued in (False, True):
        chat = Chat(messages, (), not continued, continued)
        ids = await service.encode_chat(messages, add_generation_prompt=not continued, continue_final_message=continued)
        assert ids.tolist() == text_model.required_template().encode(chat).tolist()


async def test_many_texts_at_once_each_get_their_own_ids(service: TextService) -> None:
    texts = [f"{number} " * (INLINE_CHARS + 50 * number) for number in range(20)]
    results = await asyncio.gather(*(service.encode(text) for text in texts))
    for text, ids in zip(texts, results):
        assert ids.tolist() == service.tokenizer.encode(text).tolist()


async def test_a_first_token_is_put_before_text_where_the_model_wants_one(
    service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.tokenizer, "add_bos", True)
    assert (await service.encode("Hello world")).tolist() == [1, 19556, 905]
    assert (await service.encode("Hello world", add_special_tokens=False)).tolist() == [19556, 905]


async def test_a_rendering_that_is_long_though_the_messages_are_not_goes_to_the_worker(
    make_service: MakeService,
) -> None:
    service = make_service(TextLimits(), "{{ 'long prompt ' * 1000 }}{{ messages[0].content }}")
    ids = await service.encode_chat([{"role": "user", "content": "end"}])
    assert service.tokenizer.decode(ids.tolist()).endswith("long prompt end")
    assert service.worker_pid is not None


# ---------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("filler", ["", "x" * INLINE_CHARS])
async def test_bad_input_is_the_same_error_from_the_loop_and_from_the_worker(service: TextService, filler: str) -> None:
    with pytest.raises(BadText, match="surrogate"):
        await service.encode(filler + "\ud800")
    with pytest.raises((BadChat, BadText), match="surrogate"):
        await service.encode_chat([{"role": "user", "content": filler + "\ud800"}])
    with pytest.raises(BadChat, match="'nobody'"):
        await service.encode_chat([{"role": "nobody", "content": filler}])


async def test_a_missing_template_names_the_flag(text_model: TextModel, model_path: Path) -> None:
    service = TextService(TextModel(text_model.tokenizer, None), model_path)
    assert not service.has_chat_template
    with pytest.raises(BadChat, match="--chat-template FILE"):
        await service.encode_chat([{"role": "user", "content": "a"}])


async def test_a_template_without_end_is_a_bad_chat(make_service: MakeService) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    service = make_service(TextLimits(), endless)
    with pytest.raises(BadChat, match="too many loops"):
        await service.encode_chat([{"role": "user", "content": "a"}])


async def test_a_worker_that_can_not_start_fails_its_jobs_with_the_reason(
    text_model: TextModel, tmp_path: Path
) -> None:
    service = TextService(text_model, tmp_path / "gone.gguf")
    for _ in range(2):
        with pytest.raises(TextFailed, match=r"can't start.*gone\.gguf"):
            await service.encode(LONG)
    assert service.worker_pid is None


async def test_a_process_that_the_system_refuses_fails_the_jobs_that_need_it(
    service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    await service.encode(LONG)
    assert service.worker_pid is not None
    os.kill(service.worker_pid, signal.SIGSTOP)
    monkeypatch.setattr(text_jobs, "Child", refuse)
    waiting = asyncio.ensure_future(service.encode(LONG))
    await until(lambda: service._jobs.waiting == 1)
    os.kill(service.worker_pid, signal.SIGKILL)
    with pytest.raises(TextFailed, match=r"can't be started.*Resource temporarily unavailable"):
        await waiting
    with pytest.raises(TextFailed, match=r"can't be started.*Resource temporarily unavailable"):
        await service.encode(LONG)
    monkeypatch.undo()
    assert len(await service.encode(LONG)) > 0


async def test_work_beyond_the_bounds_is_refused_at_once(make_service: MakeService) -> None:
    service = make_service(TextLimits(jobs=2, chars=len(LONG) * 2))
    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(service.encode(LONG)) for _ in range(2)]
        await until(lambda: service._jobs.waiting == 2)
        with pytest.raises(Overloaded, match="2 texts with") as refused:
            await service.encode(LONG)
        assert refused.value.retry_after_s >= 1
    assert jobs[0].result().tolist() == jobs[1].result().tolist()
    service = make_service(TextLimits(chars=len(LONG) + 10))
    async with asyncio.TaskGroup() as group:
        group.create_task(service.encode(LONG))
        await until(lambda: service._jobs.waiting == 1)
        with pytest.raises(Overloaded):
            await service.encode("x" * (INLINE_CHARS + 1))


# ---------------------------------------------------------------------------------------------------------------
# A worker that dies or hangs


async def test_a_worker_that_dies_idle_is_said_to_have_had_no_text(
    service: TextService, caplog: pytest.LogCaptureFixture
) -> None:
    await service.encode(LONG)
    pid = service.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: service.worker_pid is None)
    assert [record.getMessage() for record in caplog.records] == [
        "the text worker ended (signal 9), with no text to work on"
    ]


async def test_a_killed_worker_fails_the_job_it_worked_on_and_the_next_one_works(service: TextService) -> None:
    job = asyncio.ensure_future(service.encode(VERY_LONG))
    await until(lambda: is_working(service))
    pid = service.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TextFailed, match=r"ended \(signal 9\) while it worked on this text"):
        await job
    assert (await service.encode(LONG)).tolist() == service.tokenizer.encode(LONG).tolist()
    assert service.worker_pid not in (None, pid)


async def test_a_job_that_was_not_worked_on_survives_the_workers_death(service: TextService) -> None:
    first = asyncio.ensure_future(service.encode(VERY_LONG))
    await until(lambda: is_working(service))
    assert service.worker_pid is not None
    os.kill(service.worker_pid, signal.SIGSTOP)  # it takes no further job
    second = asyncio.ensure_future(service.encode(LONG))
    await until(lambda: service._jobs.waiting == 2)
    os.kill(service.worker_pid, signal.SIGKILL)
    with pytest.raises(TextFailed):
        await first
    assert (await second).tolist() == service.tokenizer.encode(LONG).tolist()
    assert service.worker_restarts == 1


async def test_a_job_beyond_its_time_fails_and_a_hanging_worker_is_replaced(service: TextService) -> None:
    await service.encode(LONG)
    pid = service.worker_pid
    assert pid is not None
    service._jobs.limits = TextLimits(job_s=2.0)
    job = asyncio.ensure_future(service.encode(VERY_LONG))
    await until(lambda: is_working(service))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TextTimeout, match="longer than 2 s; send a shorter text"):
        await job
    service._jobs.limits = TextLimits()
    assert len(await service.encode(LONG)) > 0
    assert service.worker_pid not in (None, pid)


async def test_a_job_beyond_its_time_that_was_only_waiting_leaves_the_worker_alone(service: TextService) -> None:
    await service.encode(LONG)
    pid = service.worker_pid
    first = asyncio.ensure_future(service.encode(VERY_LONG))
    await until(lambda: is_working(service))
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    service._jobs.limits = TextLimits(job_s=0.1)
    with pytest.raises(TextTimeout):
        await service.encode(LONG)
    os.kill(pid, signal.SIGCONT)
    assert len(await first) == len(VERY_LONG)
    assert service.worker_pid == pid


async def test_a_job_that_nobody_waits_for_is_dropped(service: TextService) -> None:
    job = asyncio.ensure_future(service.encode(VERY_LONG))
    await until(lambda: is_working(service))
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert service._jobs.waiting == 0
    pid = service.worker_pid
    assert len(await service.encode(LONG)) > 0
    assert service.worker_pid == pid and service.worker_restarts == 0


async def test_closing_fails_what_is_not_done(service: TextService) -> None:
    job = asyncio.ensure_future(service.encode(LONG))
    await until(lambda: service._jobs.waiting == 1)
    service.close()
    with pytest.raises(TextFailed, match="stopping"):
        await job
    with pytest.raises(TextFailed, match="stopping"):
        await service.encode(LONG)
    assert service.worker_pid is None


def test_the_worker_dies_with_a_server_that_was_killed(model_path: Path) -> None:
    source = (
        "import asyncio, sys\n"
        "from headrace.server.text import TextService\n"
        "async def main():\n"
        "    service = TextService.open(sys.argv[1])\n"
        "    await service.encode('long ' * 1000)\n"
        "    print(service.worker_pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-P", "-c", source, str(model_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        worker = os.pidfd_open(int(server.stdout.readline()))
        server.kill()
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        ended = poll.poll(10_000)
        os.close(worker)
    assert ended


# ---------------------------------------------------------------------------------------------------------------
# The loop


async def test_a_short_text_overtakes_a_long_one_and_the_loop_is_never_held(service: TextService) -> None:
    messages = [{"role": "user", "content": LONG * 10}, {"role": "user", "content": "é" * 300_000}]
    held_s = await longest_turn(service.encode_chat(messages), service.encode("word " * 1000))
    # The thread's own time: other processes may have the core for longer than any of our slices.
    assert held_s < 0.02


async def longest_turn(long: Awaitable[object], short: Awaitable[object]) -> float:
    """Run both; the short one must be done first. Returns the most time that one turn of the loop took."""
    first, second = asyncio.ensure_future(long), asyncio.ensure_future(short)
    longest = 0.0
    begin = time.thread_time()
    while not first.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, begin = max(longest, now - begin), now
    assert second.done()
    await asyncio.gather(first, second)
    return longest
