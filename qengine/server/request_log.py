"""Requests in the log: only where log_requests is set, for prompts are nobody else's business."""

from __future__ import annotations

import logging

from qengine.server.generation import Job
from qengine.server.settings import ServerSettings

logger = logging.getLogger(__name__)


def log_request(settings: ServerSettings, job: Job) -> None:
    """One line for each prompt: id, parameters, the prompt's beginning."""
    if not settings.log_requests:
        return
    for prompt in job.prompts:
        shown = prompt.text if prompt.text is not None else prompt.token_ids
        logger.info(
            "%r: %d tokens, %s, prompt %r", job.id, len(prompt.token_ids), job.params, shown[: settings.max_log_len]
        )
