"""The page at `/`: its files, read once from the package, with the headers that keep it from running anything else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""What a file of the page may be. A file with another ending is not served."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""No other host, no inline script or style, no frame around the page; HTML from text only through DOMPurify."""

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Browsers keep a file but ask each time whether it changed: a new version of the server shows at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page: its bytes, its media type, and a tag that changes with its bytes."""

    content: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """The page's files by their path below `/page/`. A request's path is looked up here and never reaches the disk."""
    folder = Path(__file__).resolve().parent / "page"
    found: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*")):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = PageFile(content, media_type, etag)
    return found


FILES = page_files()
router = APIRouter(include_in_schema=False)


def answer(request: Request, file: PageFile) -> Response:
    """The file, or 304 where the client has it already."""
    headers = {**HEADERS, "ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The page."""
    return answer(request, FILES["index.html"])


@router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
async def page_file(name: str, request: Request) -> Response:
    """One of the page's files."""
    file = FILES.get(name)
    if file is None:
        raise HTTPException(404, f"/page/{name} is not a file of this page; the page is at /")
    return answer(request, file)
