"""What a request is told of its blocks, step after step."""

from __future__ import annotations

import time

import pytest
from driver import Request, keys
from hypothesis import given
from hypothesis import strategies as st

from kvstore.types import BlockKey
from kvstore.vllm.lookups import BlockKeys, Lookups, block_key, offload_key

PROMPT = keys(4)


class Asked:
    """Lookups whose questions a test answers; one request's prompt may fill `most` rows."""

    def __init__(self, most: int = 99) -> None:
        self.questions: list[BlockKey] = []
        self.lookups = Lookups(self.questions.extend, most, lambda _key, _request: False)

    def told(self, request: Request) -> list[bool | None]:
        """Of each of its blocks."""
        return [self.lookups.find(key, request.context) for key in request.keys]

    def answer(self, *found: bool) -> None:
        """The oldest questions."""
        answers = list(zip(self.questions, found, strict=False))
        del self.questions[: len(found)]
        self.lookups.answered(answers)


def test_a_block_is_asked_for_once_and_its_answer_is_kept() -> None:
    asked, first, second = Asked(), Request(PROMPT), Request(PROMPT)
    assert asked.told(first) == asked.told(second) == asked.told(first) == [None] * 4
    assert asked.questions == [block_key(key) for key in PROMPT]
    asked.answer(True, True, False, True)
    assert asked.told(first) == asked.told(second) == [True, True, False, True]
    assert not asked.questions
    assert not asked.lookups.waiting


def test_a_block_that_failed_stays_a_miss_for_all_who_were_told_otherwise_and_no_other_does() -> None:
    asked, first, second = Asked(), Request(PROMPT), Request(PROMPT[:2])
    asked.told(first), asked.told(second)
    asked.answer(True, True, True, True)
    asked.lookups.failed(PROMPT[1:2])
    assert asked.told(first) == [True, False, True, True]
    assert asked.told(second) == [True, False]
    asked.lookups.answered([(block_key(PROMPT[1]), True)])
    assert asked.told(first) == [True, False, True, True], "an old answer to somebody else changes nothing"


def test_what_fails_costs_no_more_where_many_requests_know_of_it() -> None:
    """Only whoever asks finds out: 64 requests of 512 blocks that are all lost would cost a step milliseconds."""
    prompt = keys(512)

    def cost(requests: int) -> float:
        asked = Asked(most=10_000)
        known = [Request(prompt) for _ in range(requests)]
        for request in known:
            asked.told(request)
        asked.answer(*[True] * len(asked.questions))
        begin = time.thread_time()
        asked.lookups.failed(prompt)
        spent = time.thread_time() - begin
        assert all(asked.told(request) == [False] * len(prompt) for request in known)
        return spent

    cost(1)
    assert min(cost(64) for _ in range(3)) < 16 * max(cost(1) for _ in range(3))


def test_a_block_that_failed_and_is_there_again_is_a_hit_for_who_asks_later() -> None:
    asked, early, late = Asked(), Request(PROMPT), Request(PROMPT)
    asked.told(early)
    asked.answer(*[True] * 4)
    asked.lookups.failed(PROMPT)
    asked.told(late)
    asked.answer(*[True] * 4)
    assert asked.told(late) == [True] * 4
    assert asked.told(early) == [False] * 4
    asked.lookups.failed(PROMPT[:1])
    assert asked.told(late) == [False, True, True, True]


def test_failures_that_nobody_can_have_been_told_of_are_forgotten() -> None:
    asked, first, second = Asked(), Request(PROMPT), Request(PROMPT)
    asked.told(first)
    asked.lookups.failed(PROMPT[:2])
    asked.told(second)
    asked.lookups.failed(PROMPT[3:])
    asked.lookups.forget(first.id)
    assert list(asked.lookups._failed) == list(PROMPT[3:])
    asked.lookups.forget(second.id)
    assert not asked.lookups._failed


def test_blocks_that_failed_make_room_for_a_request_that_waits_for_rows() -> None:
    asked, request = Asked(most=4), Request(PROMPT)
    asked.told(request)
    asked.answer(*[True] * 4)
    assert asked.lookups.held_back(request.id, 2, patience=60)
    asked.lookups.failed(PROMPT[2:])
    assert not asked.lookups.held_back(request.id, 2, patience=60)
    assert asked.told(request) == [True, True, False, False]


def test_a_new_request_asks_anew_and_a_request_that_ended_leaves_nothing() -> None:
    asked, first = Asked(), Request(PROMPT)
    asked.told(first)
    asked.answer(False, False)
    asked.lookups.forget(first.id)
    asked.answer(True, True)
    assert not asked.lookups.waiting
    assert asked.told(Request(PROMPT)) == [None] * 4


def test_no_request_is_promised_more_blocks_than_there_are_rows() -> None:
    asked, request, other = Asked(most=2), Request(PROMPT), Request(PROMPT[2:])
    asked.told(request), asked.told(other)
    asked.answer(False, True, True, True)
    assert asked.told(request) == [False, True, True, False]
    assert asked.told(other) == [True, True]
    asked.lookups.failed(PROMPT[1:2])
    late = keys(1, "late")
    request.keys += late
    asked.told(request)
    asked.answer(True)
    assert asked.told(request) == [False, False, True, False, True], "a failed one makes room"


@given(st.binary(min_size=16, max_size=64), st.integers(0, 2**32 - 1))
def test_names_of_blocks_go_there_and_back(digest: bytes, group: int) -> None:
    key = digest + group.to_bytes(4, "big")
    assert block_key(key) == BlockKey(digest, group)
    assert offload_key(block_key(key)) == key


@pytest.mark.parametrize("container", [list, tuple, dict.fromkeys])
def test_keys_are_converted_when_they_are_looked_at(container: type) -> None:
    converted = BlockKeys(container(PROMPT))
    assert len(converted) == 4
    assert list(converted) == [block_key(key) for key in PROMPT]
    assert block_key(PROMPT[2]) in converted
    assert PROMPT[2] not in converted
