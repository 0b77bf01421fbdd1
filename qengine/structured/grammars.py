"""Languages compiled for one tokenizer: in threads of their own, remembered, bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from qengine.config import StructuredConfig
from qengine.errors import RequestError
from qengine.structured.child import Child
from qengine.structured.languages import COMPILE, is_risky, reason_of
from qengine.structured.matcher import TokenMatcher, mask_words
from qengine.structured.vocabulary import import_xgrammar, token_table
from qengine.structured_outputs import StructuredOutputs

Key = tuple[str, str, bool]


class GrammarStore:
    """Compiles StructuredOutputs for a tokenizer. `request` is for one thread; the rest happens in the pool's.

    vocab_size: ids from here on are never sampled. stop_ids: the model's end tokens. Nothing is imported, and the
    vocabulary not read, before the first request.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int], config: StructuredConfig) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._stop_ids = sorted(token for token in stop_ids if token < vocab_size)
        self._config = config
        self._lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._table: Any = None
        self._compiler: Any = None
        self._local = threading.local()
        self._children: list[Child] = []
        self._known: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
        self._running: dict[Key, Future[Any]] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def cached_bytes(self) -> int:
        """Memory of what is remembered."""
        with self._lock:
            return sum(size for _, size in self._known.values())

    def request(self, wanted: StructuredOutputs) -> Future[Any]:
        """A future of the compiled form; it is done at once where the language is known.

        It fails with a RequestError for what is no schema, regex or grammar, or allows no text. Raises RequestError
        for what is too long, or for a model or an installation that cannot do it.
        """
        self._check(wanted)
        key = wanted.key
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                ready: Future[Any] = Future()
                ready.set_result(self._known[key][0])
                return ready
            if key not in self._running:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._config.structured_outputs_threads, "qengine-grammar")
                self._running[key] = self._pool.submit(self._make, key)
            return self._running[key]

    @property
    def timeout(self) -> float:
        """Seconds after which nobody should wait for a compiled form any more."""
        return self._config.structured_outputs_timeout

    def matcher(self, compiled: Any) -> TokenMatcher:
        """A fresh matcher for one sequence."""
        return TokenMatcher(compiled, self._stop_ids)

    def close(self) -> None:
        """Compile no more; what is being compiled is not waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for child in self._children:
                child.close()

    def _check(self, wanted: StructuredOutputs) -> None:
        most, size = self._config.structured_outputs_max_bytes, len(wanted.source.encode())
        if size > most:
            raise RequestError(
                f"structured_outputs.{wanted.kind} has {size} bytes; at most {most} are allowed: shorten it, or raise "
                "structured_outputs_max_bytes"
            )
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer; load the model without skip_tokenizer_init")
        if not self._stop_ids:
            raise RequestError("structured_outputs needs an end token, and the model's configuration names none")
        import_xgrammar()

    def _make(self, key: Key) -> Any:
        """In a thread of the pool: compile and remember."""
        try:
            compiled = self._compile(key)
        finally:
            with self._lock:
                self._running.pop(key, None)
        size = compiled.memory_size_bytes + len(key[1])
        most = self._config.structured_outputs_cache_mib * 2**20
        with self._lock:
            self._known[key] = (compiled, size)
            while self._known and sum(one for _, one in self._known.values()) > most:
                self._known.popitem(last=False)
        return compiled

    def _compile(self, key: Key) -> Any:
        kind, source, one_line = key
        with self._table_lock:
            if self._compiler is None:
                self._table = token_table(self._tokenizer, self.vocab_size, self._stop_ids)
                self._compiler = import_xgrammar().GrammarCompiler(self._table, max_threads=1, cache_enabled=False)
        try:
            if is_risky(kind, source):
                compiled = self._compile_apart(key)
            else:
                compiled = COMPILE[kind](self._compiler, source, not one_line)
        except RequestError:
            raise
        except Exception as error:  # xgrammar has RuntimeError and others for what it cannot read
            raise RequestError(f"structured_outputs.{kind} cannot be compiled: {reason_of(error)}") from error
        words = np.zeros(mask_words(self.vocab_size), dtype=np.int32)
        self.matcher(compiled).fill(words)
        if not words.any():
            raise RequestError(f"structured_outputs.{kind} allows no text at all; correct it")
        return compiled

    def _compile_apart(self, key: Key) -> Any:
        """In a process of its own, one a thread, which is ended where it takes too long or too much."""
        child = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = Child(self._table)
            with self._lock:
                self._children.append(child)
        kind, source, one_line = key
        return child.compile(kind, source, not one_line, self._config.structured_outputs_timeout)
