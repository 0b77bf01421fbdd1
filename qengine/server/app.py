"""The application: routes, error shapes and what stands before them."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer

import qengine
from qengine.async_llm import AsyncLLM
from qengine.server.errors import add_handlers
from qengine.server.metrics import ServerMetrics
from qengine.server.middleware import Admission, BodyLimit, Keys, UnderPath
from qengine.server.pages import router as pages
from qengine.server.routes import router
from qengine.server.settings import ServerSettings
from qengine.server.state import ServerState


def build_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """An ASGI application over a started AsyncLLM, for the event loop in which it was started.

    `app.state.server` is its ServerState. The caller closes `llm`.
    """
    docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="qengine",
        version=qengine.__version__,
        description="OpenAI's API over a quantized model.",
        openapi_url="/openapi.json" if docs else None,
        dependencies=[Depends(HTTPBearer(auto_error=False))] if settings.api_key else None,  # for /docs: Keys decides
    )
    names = settings.served_model_name or (llm.llm.config.model.model,)
    state = ServerState(llm, settings, ServerMetrics(llm, model_name=names[0]))
    app.state.server = state
    app.include_router(router)
    app.include_router(pages)
    add_handlers(app)
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, state=state)
    app.add_middleware(Admission, state=state)
    if settings.api_key:
        app.add_middleware(Keys, state=state)
    if settings.root_path:
        app.add_middleware(UnderPath, root=settings.root_path)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app
