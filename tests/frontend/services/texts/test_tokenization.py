"""The thread that tokenizes for all requests of a front end."""

import asyncio
import threading

import pytest

from noria.errors import InternalError, InvalidField
from noria.frontend.services.texts.tokenization import TokenizationThread
from noria.testing.fake_encoder import FAKE_ENCODER, FakeTokenizer
from waiting import wait_until


class PanicError(BaseException):
    """An error such as `tokenizers` raises for a panic in Rust."""


class PanickingTokenizer(FakeTokenizer):
    def encode(self, texts, side="right"):
        if "panic" in texts:
            raise PanicError
        return super().encode(texts, side)


@pytest.fixture
def tokenization():
    made = TokenizationThread(PanickingTokenizer)
    yield made
    made.close()


def test_a_panic_is_an_error_of_its_text_alone(tokenization):
    async def scenario():
        outcomes = [tokenization.tokenize(FAKE_ENCODER, [text]) for text in ("a b", "panic", "c")]
        return await asyncio.gather(*outcomes, return_exceptions=True)

    before, panicked, after = asyncio.run(scenario())
    assert isinstance(panicked, InvalidField)
    assert (before[0].num_tokens, after[0].num_tokens) == (4, 3)


def test_short_texts_are_tokenized_at_once_when_the_tokenizer_is_loaded(tokenization):
    async def scenario():
        assert tokenization.tokenize_now(FAKE_ENCODER, ["a b"]) is None
        (in_thread,) = await tokenization.tokenize(FAKE_ENCODER, ["a b"])
        assert tokenization.tokenize_now(FAKE_ENCODER, ["a b"]) == [in_thread]
        longest = "a" * (1024 - 64)
        assert tokenization.tokenize_now(FAKE_ENCODER, [longest]) is not None
        assert tokenization.tokenize_now(FAKE_ENCODER, [longest + "a"]) is None
        assert tokenization.tokenize_now(FAKE_ENCODER, [(longest, "")]) is not None
        assert tokenization.tokenize_now(FAKE_ENCODER, [(longest, "a")]) is None
        assert len(tokenization.tokenize_now(FAKE_ENCODER, [""] * 16)) == 16
        assert tokenization.tokenize_now(FAKE_ENCODER, [""] * 17) is None
        assert tokenization.tokenize_now(FAKE_ENCODER, ["a"] * 20) is None
        assert tokenization.tokenize_now(FAKE_ENCODER, [("a " * 300, "b " * 300)]) is None
        with pytest.raises(InvalidField):
            tokenization.tokenize_now(FAKE_ENCODER, ["panic"])

    asyncio.run(scenario())


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_of_each_request():
    def load(_):
        raise PanicError

    async def scenario():
        for _ in range(2):
            with pytest.raises(InternalError):
                await tokenization.tokenize(FAKE_ENCODER, ["a"])

    tokenization = TokenizationThread(load)
    asyncio.run(scenario())
    tokenization.close()


def test_what_waits_is_done_together_up_to_a_limit_and_by_side_and_work_apart():
    tokenizer, may_load = FakeTokenizer(), threading.Event()

    def load(_):
        may_load.wait(30)
        return tokenizer

    async def scenario():
        tokenization = TokenizationThread(load)
        calls = [tokenization.run(FAKE_ENCODER, lambda each: each is tokenizer)]  # the thread waits with it
        await asyncio.to_thread(wait_until, tokenization._jobs.empty)
        calls += [tokenization.tokenize(FAKE_ENCODER, ["a b", "c"]), tokenization.tokenize(FAKE_ENCODER, ["d"] * 254)]
        calls += [tokenization.tokenize(FAKE_ENCODER, ["e"], side) for side in ("right", "left")]
        may_load.set()
        results = await asyncio.gather(*calls)
        await asyncio.to_thread(tokenization.close)
        assert results[0] is True
        assert [[text.num_tokens for text in each] for each in results[1:]] == [[4, 3], [3] * 254, [3], [3]]

    asyncio.run(scenario())
    assert tokenizer.batch_sizes == [256, 1, 1]


def test_texts_of_clients_that_have_gone_are_not_tokenized():
    tokenizer = FakeTokenizer()

    async def scenario():
        blocked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def load(_):
            asyncio.run_coroutine_threadsafe(blocked.wait(), loop).result()
            return tokenizer

        tokenization = TokenizationThread(load)
        first = tokenization.tokenize(FAKE_ENCODER, ["a"])
        await asyncio.sleep(0.05)  # the thread waits for the tokenizer with the first text only
        gone = tokenization.tokenize(FAKE_ENCODER, ["b"])
        gone.cancel()
        blocked.set()
        await first
        await tokenization.tokenize(FAKE_ENCODER, ["c"])
        await asyncio.to_thread(tokenization.close)

    asyncio.run(scenario())
    assert tokenizer.batch_sizes == [1, 1]
