"""`LLM`: a model to call from Python. The engine below does the work; this class is its vLLM-shaped front."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from qengine.config import EngineConfig
from qengine.engine.engine import Engine
from qengine.engine.interrupts import uninterrupted
from qengine.engine.loading import load_engine
from qengine.engine.progress import generation_progress, loading_progress
from qengine.engine.prompts import Prompt, encode, read_prompt, render_chat, split_conversations, split_prompts
from qengine.engine.request import Request
from qengine.errors import ClosedError, QEngineError, RequestError
from qengine.models import Decoder
from qengine.outputs import RequestOutput, StreamDelta
from qengine.perplexity import Perplexity, perplexity
from qengine.sampling_params import SamplingParams

DEFAULTS_FROM_MODEL = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's names -> SamplingParams' names."""


class LLM:
    """A model loaded for generation.

    `LLM(model, **settings)`: every setting with its default and meaning is a field of a dataclass in
    `qengine.config`. Sampling defaults, for calls without SamplingParams, come from the model's generation_config.json
    (see `get_default_sampling_params`). Not for use from several threads at once.

    Raises ConfigError (a setting), CheckpointError (the files), UnsupportedError (the model) or CapacityError
    (memory), each with what to do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        quantization: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.from_kwargs(
            model=os.fspath(model),
            tokenizer=None if tokenizer is None else os.fspath(tokenizer),
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            quantization=quantization,
            **settings,
        )
        with loading_progress() as progress:
            loaded = load_engine(self.config, progress)
        self._engine: Engine | None = loaded.engine
        self._tokenizer = loaded.tokenizer
        self._generation_config = loaded.generation_config
        self._model: Decoder | None = loaded.model
        self.memory = loaded.memory
        self.block_bytes = loaded.block_bytes

    @property
    def engine(self) -> Engine:
        """The engine. Raises ClosedError once closed."""
        if self._engine is None:
            raise ClosedError("this LLM is closed; create a new one with LLM(model, ...)")
        return self._engine

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results in the prompts' order.

        prompts: a string, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids} (both with an optional
        "cache_salt"), or a list of these in any mixture. sampling_params: one for all, a list with one for each, or
        None for the model's defaults. use_tqdm: a progress bar on stderr, if that is a terminal. priority: lower is
        served first, where scheduling_policy="priority"; one for all, or a list with one for each prompt.

        Raises RequestError, before any work, that names the first prompt that cannot be served.
        """
        items = split_prompts(prompts)
        params = self._params_for(sampling_params, len(items))
        return self._run(lambda index: read_prompt(items[index], self._tokenizer), params, use_tqdm, priority)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them: messages are {"role": ..., "content": ...}.

        chat_template: Jinja text instead of the model's own. continue_final_message: the last message is the
        beginning of the answer (set add_generation_prompt=False). priority: see `generate`. Raises RequestError, as for
        a model without a template.
        """
        conversations = split_conversations(messages)
        params = self._params_for(sampling_params, len(conversations))

        def prompt(index: int) -> Prompt:
            text = render_chat(
                conversations[index],
                self._tokenizer,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            return Prompt(encode(text, self._tokenizer, add_special_tokens=False), text)

        return self._run(prompt, params, use_tqdm, priority)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """Complete one prompt, yielding what each step adds. Closing the iterator aborts the request.

        Several streams may be open; each step advances them all. Raises RequestError before the first step.
        """
        items = split_prompts(prompt)
        if len(items) != 1:
            raise RequestError(f"stream takes one prompt, got {len(items)}; open a stream for each")
        request = self._add(read_prompt(items[0], self._tokenizer), self._params_for(sampling_params, 1)[0], True)
        return self.engine.stream(request)

    def stream_chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
    ) -> Iterator[StreamDelta]:
        """Answer one conversation, yielding what each step adds."""
        [conversation] = split_conversations(messages)
        text = render_chat(conversation, self._tokenizer, chat_template=chat_template)
        prompt = Prompt(encode(text, self._tokenizer, add_special_tokens=False), text)
        return self.engine.stream(self._add(prompt, self._params_for(sampling_params, 1)[0], True))

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises QEngineError if none was loaded."""
        _ = self.engine
        if self._tokenizer is None:
            raise QEngineError("no tokenizer was loaded (skip_tokenizer_init=True)")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults of the model's generation_config.json.

        As in vLLM, do_sample is not looked at, and with generation_config="vllm" the file is not.
        """
        values: dict[str, Any] = {}
        if self.config.model.generation_config == "auto":
            for theirs, ours in DEFAULTS_FROM_MODEL.items():
                if self._generation_config.get(theirs) is not None:
                    values[ours] = self._generation_config[theirs]
        return SamplingParams(**values)

    def perplexity(
        self, text: str | Sequence[int], seq_len: int = 2048, *, max_windows: int | None = None
    ) -> Perplexity:
        """Score a text, or token ids, in windows that do not overlap: see `qengine.perplexity.perplexity`.

        A text is tokenized without special tokens. It is computed in the model's dtype, not through the KV cache.
        """
        model = self._loaded_model()
        ids = encode(text, self._tokenizer, add_special_tokens=False) if isinstance(text, str) else list(text)
        return perplexity(model, ids, seq_len, max_windows=max_windows)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._loaded_model().device

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return self._loaded_model().memory_bytes()

    def close(self) -> None:
        """End all requests and free the model and its cache. A second call does nothing."""
        if self._engine is None:
            return
        self._engine.close()
        self._engine = self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _loaded_model(self) -> Decoder:
        _ = self.engine
        assert self._model is not None, "an open LLM has a model"
        return self._model

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """One SamplingParams for each of `count` prompts."""
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in given):
            raise RequestError(f"sampling_params={given!r} is not allowed; give SamplingParams, or a list of them")
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts; give one, or one for each prompt")
        return list(given)

    def _priorities_for(self, given: int | Sequence[int] | None, count: int) -> list[int]:
        """One priority for each of `count` prompts; what they may be is checked with the request."""
        if not isinstance(given, (list, tuple)):
            return [0 if given is None else given] * count  # type: ignore[list-item]
        if len(given) != count:
            raise RequestError(f"{len(given)} priorities for {count} prompts; give one, or one for each prompt")
        return list(given)

    def _add(self, prompt: Prompt, params: SamplingParams, streamed: bool, priority: int = 0) -> Request:
        return self.engine.add_request(
            prompt.token_ids,
            params,
            prompt=prompt.text,
            cache_salt=prompt.cache_salt,
            streamed=streamed,
            priority=priority,
        )

    def _run(
        self,
        read: Any,
        params: list[SamplingParams],
        show_progress: bool,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        """Queue all prompts, or none if one is wrong; step until they are done."""
        engine, priorities = self.engine, self._priorities_for(priority, len(params))
        requests: list[Request] = []
        try:
            for index, one in enumerate(params):
                with uninterrupted():
                    try:
                        requests.append(self._add(read(index), one, False, priorities[index]))
                    except RequestError as error:
                        raise RequestError(f"prompt {index}: {error}" if len(params) > 1 else str(error)) from error
            with generation_progress(requests, show_progress) as advance:
                while not all(request.finished for request in requests):
                    advance(engine.step())
                    _refuse(requests)
        except BaseException:
            with uninterrupted():
                for request in requests:
                    engine.abort(request)
            raise
        for request in requests:
            if request.error is not None:
                raise copy.copy(request.error)
        return [request.result() for request in requests]


def _refuse(requests: list[Request]) -> None:
    """Raise the RequestError of the first request that turned out not to be one that can be served."""
    for index, request in enumerate(requests):
        if isinstance(request.error, RequestError):
            raise RequestError(f"prompt {index}: {request.error}" if len(requests) > 1 else str(request.error))
