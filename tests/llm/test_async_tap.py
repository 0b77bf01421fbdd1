"""A tap on a stream gets what its consumer waits for, in order, and leaves the rest to it."""

import asyncio

import pytest

from qengine.engine.async_stream import Progress, RequestOutputKind, RequestStream
from qengine.outputs import StreamDelta


class Tap:
    def __init__(self):
        self.open = True
        self.got = []
        self.error = None

    def put(self, output):
        if self.error is not None:
            raise self.error
        self.got.append(text_of(output))


def text_of(output):
    return "".join(choice.text for choice in output.outputs)


def news(text, **more):
    return Progress([StreamDelta(0, text, [1])], **more)


def play(scenario, kind=RequestOutputKind.DELTA):
    """`scenario(stream, tap, texts)` beside a consumer that appends to texts: it waits when the scenario begins.

    Returns what the consumer got, and its error.
    """

    async def main():
        tap, texts, gate = Tap(), [], asyncio.Event()
        gate.set()
        stream = RequestStream("a", None, 1, kind, tap=tap)

        async def consume():
            while True:
                output = await stream.next()
                await gate.wait()
                texts.append(text_of(output))
                if output.finished:
                    return

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        await scenario(stream, tap, gate)
        return tap.got, texts, (await asyncio.gather(task, return_exceptions=True))[0]

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_it_gets_all_but_the_last_at_once():
    async def scenario(stream, tap, gate):
        for text in "abc":
            stream.add(news(text))
            assert tap.got[-1] == text, "before the consumer could run"
        stream.add(news("d", finished=True))

    assert play(scenario) == (["a", "b", "c"], ["d"], None)


def test_a_consumer_that_is_busy_gets_what_comes_meanwhile():
    async def scenario(stream, tap, gate):
        gate.clear()
        tap.open = False
        stream.add(news("a"))
        tap.open = True
        stream.add(news("b"))  # the consumer is to wake for "a" first
        assert tap.got == []
        await asyncio.sleep(0.01)  # it has "ab" and is held
        stream.add(news("c"))
        stream.add(news("d"))
        assert tap.got == []
        gate.set()
        await asyncio.sleep(0.01)  # it took "cd" and waits
        stream.add(news("e"))
        assert tap.got == ["e"]
        stream.add(news("f", finished=True))

    assert play(scenario) == (["e"], ["ab", "cd", "f"], None)


def test_while_it_is_closed_the_consumer_gets_everything():
    async def scenario(stream, tap, gate):
        stream.add(news("a"))
        tap.open = False
        for text in "bc":
            stream.add(news(text))
            await asyncio.sleep(0.01)
        tap.open = True
        stream.add(news("d"))
        stream.add(news("e", finished=True))

    assert play(scenario) == (["a", "d"], ["b", "c", "e"], None)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_other_kinds_of_output(kind):
    async def scenario(stream, tap, gate):
        stream.add(news("a"))
        stream.add(news("b"))
        stream.add(news("c", finished=True))

    cumulative = kind is RequestOutputKind.CUMULATIVE
    assert play(scenario, kind) == (["a", "ab"] if cumulative else [], ["abc"], None)


def test_what_it_raises_is_raised_in_the_consumer():
    async def scenario(stream, tap, gate):
        tap.error = ValueError("the form is wrong")
        stream.add(news("a"))
        stream.add(news("b"))
        assert not stream.finished, "so that the engine is told to end the request"

    got, texts, error = play(scenario)
    assert (got, texts) == ([], [])
    assert error.args == ("the form is wrong",)


def test_nothing_reaches_it_after_its_consumer_has_gone():
    async def main():
        tap = Tap()
        stream = RequestStream("a", None, 1, RequestOutputKind.DELTA, tap=tap)
        task = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stream.add(news("a"))
        return tap.got

    assert asyncio.run(main()) == []
