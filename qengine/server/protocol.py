"""What requests of all kinds have in common. Fields that are not known are let through and ignored, as in vLLM."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool


class Wire(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Wire):
    """include_usage: a last chunk with the usage and no choices. continuous_usage_stats: usage in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingFields(Wire):
    """Sampling, stopping and what the answer holds. null and a missing field are the same: the default.

    Defaults are the model's own (generation_config.json), else those of `SamplingParams`, where every field of the same
    name is explained.
    """

    model: str | None = Field(None, description="A name of /v1/models; may be left out.")
    n: int | None = Field(None, description="Completions of each prompt.")
    best_of: int | None = Field(None, description="Only the same as n.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id, as text, to a number in [-100, 100].")
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: int | None = Field(0, description="Lower is served first; needs --scheduling-policy priority.")
    request_id: str | None = Field(None, max_length=256, description="Part of the answer's id.")
    cache_salt: str | None = Field(None, description="Only prompts with the same salt share cached blocks.")
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = Field(False, description='In logprobs, "token_id:123" for the text.')
    user: str | None = Field(None, description="Ignored.")

    response_format: dict[str, Any] | None = Field(
        None, description='{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}'
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice and grammar."
    )
    guided_json: str | dict[str, Any] | StrictBool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def count(self) -> int:
        """Completions of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)
