"""The worker's side of a job: pieces in turn, and answers that say what became of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.server.chat import BadTemplate, Chat, TextModel
from headrace.server.text_wire import (
    Cancel,
    Done,
    Failed,
    FrameReader,
    Ids,
    Load,
    Loaded,
    ToServer,
    Working,
    chat_frames,
    text_frames,
    to_worker_decoder,
)
from headrace.server.text_worker import TextWorker


class Conversation:
    """A worker in this process, and what it answered."""

    def __init__(self, model_path: Path, chat_template: str | None = None) -> None:
        self.answers: list[ToServer] = []
        self.worker = TextWorker(self.answers.append)
        self.worker.handle(Load(str(model_path), chat_template))
        assert self.answers.pop() == Loaded()

    def text(self, job: int, text: str) -> None:
        self._send(b"".join(text_frames(text, job)))

    def chat(self, job: int, chat: Chat) -> None:
        self._send(b"".join(chat_frames(chat, job)))

    def work(self) -> None:
        while self.worker.is_busy:
            self.worker.work()

    def ids(self, job: int) -> list[int]:
        data = b"".join(answer.data for answer in self.answers if isinstance(answer, Ids) and answer.job == job)
        return [int(index) for index in np.frombuffer(data, np.int32)]

    def _send(self, data: bytes) -> None:
        for body in FrameReader().feed(data):
            self.worker.handle(to_worker_decoder.decode(body))


@pytest.fixture
def conversation(model_path: Path) -> Conversation:
    return Conversation(model_path)


def test_a_text_gives_its_ids_piece_by_piece(conversation: Conversation, text_model: TextModel) -> None:
    text = "one two three, " * 3000
    conversation.text(1, text)
    conversation.work()
    assert conversation.ids(1) == text_model.tokenizer.encode(text).tolist()
    assert conversation.answers[0] == Working(1) and conversation.answers[-1] == Done(1)
    assert sum(isinstance(answer, Ids) for answer in conversation.answers) == 6


def test_a_conversation_gives_the_ids_of_its_rendering(conversation: Conversation, text_model: TextModel) -> None:
    messages = [{"role": "user", "content": f"<|im_end|> {number} " * 500} for number in range(20)]
    chat = Chat(messages, add_generation_prompt=False)
    conversation.chat(1, chat)
    conversation.work()
    assert conversation.ids(1) == text_model.required_template().encode(chat).tolist()


def test_an_empty_text_is_done_at_once(conversation: Conversation) -> None:
    conversation.text(1, "")
    conversation.work()
    assert conversation.ids(1) == [] and conversation.answers[-1] == Done(1)


def test_a_short_text_does_not_wait_for_a_long_one(conversation: Conversation) -> None:
    conversation.text(1, "word " * 20_000)
    conversation.text(2, "word")
    conversation.work()
    done = [answer.job for answer in conversation.answers if isinstance(answer, Done)]
    assert done == [2, 1]


def test_it_says_which_job_it_works_on(conversation: Conversation) -> None:
    conversation.text(1, "word " * 4000)
    conversation.text(2, "word")
    conversation.work()
    assert [answer.job for answer in conversation.answers if isinstance(answer, Working)] == [1, 2, 1, 2, 1]


def test_a_cancelled_job_is_forgotten_in_whatever_state_it_is(conversation: Conversation) -> None:
    conversation.text(1, "word " * 4000)
    conversation.worker.work()
    frames = b"".join(list(text_frames("word", 2))[:-1])  # not closed yet
    conversation._send(frames)
    for job in (1, 2, 3):
        conversation.worker.handle(Cancel(job))
    assert not conversation.worker.is_busy
    conversation._send(list(text_frames("word", 2))[-1])
    assert not conversation.worker.is_busy


def test_a_bad_conversation_fails_alone(conversation: Conversation) -> None:
    conversation.chat(1, Chat([{"role": "nobody", "content": "a"}]))
    conversation.text(2, "word")
    conversation.work()
    failed = [answer for answer in conversation.answers if isinstance(answer, Failed)]
    assert [(answer.job, answer.kind) for answer in failed] == [(1, "chat")]
    assert "nobody" in failed[0].message and Done(2) in conversation.answers


def test_a_template_that_loops_without_end_fails_its_job(model_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    conversation = Conversation(model_path, endless)
    conversation.chat(1, Chat([{"role": "user", "content": "a"}]))
    conversation.work()
    assert conversation.answers[-1] == Failed(1, "chat", "the chat template runs through too many loops")


def test_a_template_that_is_wrong_is_told_when_it_is_loaded(model_path: Path) -> None:
    with pytest.raises(BadTemplate):
        Conversation(model_path, "{% for %}")
