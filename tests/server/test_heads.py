"""Request heads that never end, by bytes and by seconds, against a real socket."""

import socket
import time

import httpx
import pytest

from qengine.server import heads

START = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connect(server):
    made = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    made.settimeout(20)
    return made


def healthy(connection):
    """A whole request and its answer."""
    connection.sendall(START + b"\r\n")
    found = b""
    while not found.endswith(b'{"status":"ok"}'):
        piece = connection.recv(65536)
        assert piece, "the connection was ended"
        found += piece


def flood(connection, line):
    for _ in range(10_000):
        connection.sendall(line)


def read_all(connection):
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


@pytest.mark.parametrize("line", [b"a" * 4000, b"X: a\r\n" * 600])
@pytest.mark.parametrize("again", [False, True])
def test_a_head_that_never_ends_is_refused(server, line, again):
    with connect(server) as connection:
        if again:
            healthy(connection)
        connection.sendall(START + b"X: ")
        with pytest.raises(ConnectionError):  # the refused rest is reset
            flood(connection, line)
    with connect(server) as connection:
        connection.sendall(START + b"X: " + b"a" * (heads.HEAD_BYTES // 2))
        time.sleep(0.05)
        connection.sendall(b"a" * heads.HEAD_BYTES)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in answer
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("sent", [b"", START])
def test_a_head_that_is_too_slow_ends_the_connection(server, sent, monkeypatch):
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    with connect(server) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - began < 5


def test_a_slow_body_and_long_answers_are_left_alone(server, monkeypatch):
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    body = b'{"prompt": "a", "max_tokens": 2}' + b" " * 2 * heads.HEAD_BYTES
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        for start in range(0, len(body), 1 << 14):
            time.sleep(0.05)
            connection.sendall(body[start : start + (1 << 14)])
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_an_idle_connection_is_kept(server, monkeypatch):
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    with connect(server) as connection:
        for _ in range(3):
            healthy(connection)
            time.sleep(0.4)
