"""What all requests of one server share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qengine.server.errors import ApiError
from qengine.server.watch import Ended, Watch

if TYPE_CHECKING:
    from qengine.async_llm import AsyncLLM
    from qengine.sampling_params import SamplingParams
    from qengine.server.metrics import ServerMetrics
    from qengine.server.settings import ServerSettings
    from qengine.server.token_text import TokenTexts


class ServerState:
    """The model, the settings and the requests under way. For one event loop.

    names: of the model, the first of which is in answers. created: Unix time of the start. active: requests under way,
    those that are not answered yet. draining: SIGTERM came; new requests are refused.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = metrics
        self.names = settings.served_model_name or (llm.llm.config.model.model,)
        self.created = int(time.time())
        self.active = 0
        self.draining = False
        self.defaults: SamplingParams = llm.get_default_sampling_params()
        self._watches: set[Watch] = set()
        self._texts: TokenTexts | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ApiError if none was loaded."""
        if self.llm.tokenizer is None:
            raise ApiError(
                "this needs a tokenizer, and the server runs without one (--skip-tokenizer-init); send token ids to "
                "/v1/completions, without echo"
            )
        return self.llm.tokenizer

    @property
    def texts(self) -> TokenTexts:
        """Texts and bytes of single tokens."""
        from qengine.server.token_text import TokenTexts

        if self._texts is None:
            self._texts = TokenTexts(self.llm.tokenizer)
        return self._texts

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.llm.llm.engine.limits.max_len

    def now(self) -> int:
        """Unix time in seconds."""
        return int(time.time())

    def check_model(self, name: str | None) -> str:
        """The name for the answer. Raises ApiError 404 for a name that is not served."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                f"the model {name!r} does not exist here; served is {known}", 404, param="model", code="model_not_found"
            )
        return name or self.names[0]

    def count_error(self, error: ApiError) -> None:
        """An error is answered."""
        self.metrics.error(error.kind, error.status)

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Count `watch` among those that `end_all` ends."""
        self._watches.add(watch)
        try:
            yield
        finally:
            self._watches.discard(watch)

    def end_all(self, reason: Ended) -> None:
        """End every request under way with an error."""
        for watch in list(self._watches):
            watch.end(reason)
