"""One server for the tests that need nothing special of it, and the same model without HTTP."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from http_server import ENGINE, running, tiny_model

from qengine import LLM


@pytest.fixture(scope="session")
def server():
    with running(engine={"scheduling_policy": "priority", "max_logprobs": 320}) as made:
        yield made


@pytest.fixture
def client(server):
    with server.client() as made:
        yield made


@pytest.fixture(scope="session")
def llm():
    with LLM(tiny_model(), max_logprobs=320, **ENGINE) as made:
        yield made
