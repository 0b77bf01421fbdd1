"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from qengine.server.chat_prompt import chat_prompt
from qengine.server.errors import ApiError
from qengine.server.prompts import off_loop, read_prompts
from qengine.server.protocol_completions import DetokenizeRequest, TokenizeRequest
from qengine.server.state import ServerState


async def tokenize(state: ServerState, request: TokenizeRequest) -> dict[str, Any]:
    """Token ids as a request would compute them. Raises ApiError."""
    state.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    if request.messages is not None:
        if not request.messages:
            raise ApiError("messages=[] is no conversation; give at least one message", param="messages")
        continues = request.continue_final_message and "add_generation_prompt" not in request.model_fields_set
        prompt = await chat_prompt(
            state,
            request.messages,
            template=request.chat_template,
            template_kwargs=request.chat_template_kwargs,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt and not continues,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
        )
    else:
        [prompt] = await read_prompts(
            state, request.prompt, add_special_tokens=request.add_special_tokens, cache_salt=None
        )
    ids = prompt.token_ids
    strings = state.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids, "token_strs": strings}


async def detokenize(state: ServerState, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, special ones included. Raises ApiError."""
    state.check_model(request.model)
    tokenizer, size = state.tokenizer, state.llm.llm.engine.limits.vocab_size
    for token in request.tokens:
        if not 0 <= token < size:
            raise ApiError(f"token id {token} is outside the vocabulary; allowed are 0 to {size - 1}", param="tokens")
    tokens = request.tokens
    text = await off_loop(len(tokens), lambda: tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    return {"prompt": text}
