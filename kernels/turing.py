"""Tensor cores on Turing (compute capability 7.5) for Triton 3.6 and later.

Triton 3.5 and later lower `tl.dot` for sm_75 to scalar multiply-adds. `install` gives the tensor cores back through
Triton's own hook `knobs.runtime.add_stages_inspection_hook`, for capability 75 and for kernels with a `tl.dot` only:

1. the TTGIR stage runs as for capability 80, so a dot gets the `mma` layout; every later stage stays at 75;
2. in the PTX each `mma.m16n8k16` of sm_80 becomes two `mma.m16n8k8` of sm_75, whose fragments coincide.

What sm_75 lacks is refused with a TuringError before it reaches the compiler: copies in flight (`num_stages` above 1),
dots of bfloat16, float8, int8 or TF32, and fp16 sums. Kernels without a dot compile as stock Triton compiles them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

OLDEST = (3, 6)
_MMA = re.compile(
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32"
    r"\s*\{([^}]*)\}\s*,\s*\{([^}]*)\}\s*,\s*\{([^}]*)\}\s*,\s*\{([^}]*)\}\s*;"
)
_HALF_MMA = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
_TENSOR = r"tensor<(?:\d+x)+(\w+)"
_DOT = re.compile(rf"\btt\.dot\b.*?:\s*{_TENSOR}[^*]*\*\s*{_TENSOR}.*?->\s*{_TENSOR}")
_PRECISION = re.compile(r"inputPrecision = (\w+)")
_LOOP_STAGES = re.compile(r"tt\.num_stages = (\d+)")
_state: dict[str, Any] = {"installed": False, "previous": None}


class TuringError(RuntimeError):
    """A kernel or a Triton version that cannot be compiled for compute capability 7.5, and why."""


def version() -> tuple[int, int]:
    """(major, minor) of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def why_not() -> str | None:
    """Why the hook cannot work with the installed Triton, or None."""
    if version() < OLDEST:
        return f"Triton {triton.__version__} has no compiler hook for compute capability 7.5; install 3.6 or later"
    if not hasattr(triton.knobs.runtime, "add_stages_inspection_hook"):
        return f"Triton {triton.__version__} has no knobs.runtime.add_stages_inspection_hook; install 3.6 to 3.9"
    from triton.backends.nvidia.compiler import CUDABackend

    if list(inspect.signature(CUDABackend.make_ttgir).parameters) != ["mod", "metadata", "opt", "capability"]:
        return f"Triton {triton.__version__} has another compiler interface than 3.6 to 3.9; install one of these"
    return None


def install() -> None:
    """Set the hook, once for the process. Raises TuringError where the installed Triton cannot take it.

    A hook that was set before is kept and called first.
    """
    if _state["installed"] and triton.knobs.runtime.add_stages_inspection_hook is _hook:
        return
    reason = why_not()
    if reason:
        raise TuringError(reason)
    previous = triton.knobs.runtime.add_stages_inspection_hook
    _state["previous"] = previous if previous is not _hook else _state["previous"]
    triton.knobs.runtime.add_stages_inspection_hook = _hook
    if version() == (3, 6):
        _key_backend()
    _state["installed"] = True


def installed() -> bool:
    """Whether the hook is set, which changes what Triton finds in its cache."""
    return triton.knobs.runtime.add_stages_inspection_hook is _hook


def ensure(sm: int) -> None:
    """Install the hook where capability `sm` needs it (75); elsewhere do nothing."""
    if sm == 75:
        install()


@functools.lru_cache
def cache_key() -> str:
    """What Triton's cache key holds of this module: a digest of its source."""
    return "turing-" + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def split_mma(ptx: str) -> str:
    """PTX with each fp16 `mma.m16n8k16` written as two `mma.m16n8k8`.

    The first takes rows of A a0, a1 and of B b0 (k 0 to 7), the second a2, a3 and b1 (k 8 to 15), on the first's sums.
    """

    def halves(match: re.Match[str]) -> str:
        d, a, b, c = ([r.strip() for r in group.split(",")] for group in match.groups())
        return (
            f"{_HALF_MMA} {_list(d)}, {_list(a[:2])}, {_list(b[:1])}, {_list(c)};\n\t"
            f"{_HALF_MMA} {_list(d)}, {_list(a[2:])}, {_list(b[1:])}, {_list(d)};"
        )

    return _MMA.sub(halves, ptx)


def refusal(ttir: str, num_stages: int) -> str | None:
    """Why a kernel, given as Triton IR text, cannot be compiled for sm_75, or None."""
    if "tt.dot_scaled" in ttir:
        return "tl.dot_scaled needs compute capability 10.0; dequantize to float16 first"
    dots = [line for line in ttir.splitlines() if "tt.dot " in line]
    if not dots:
        return None
    depth = max([num_stages, *(int(n) for n in _LOOP_STAGES.findall(ttir))])
    if depth > 1:
        return f"num_stages={depth}, but sm_75 has no asynchronous copies; launch with num_stages=1"
    return next((reason for reason in map(_dot_refusal, dots) if reason), None)


def _dot_refusal(line: str) -> str | None:
    match = _DOT.search(line)
    if not match:
        return f"a tl.dot that is not understood: {line.strip()[:120]}"
    a, b, d = match.groups()
    if a == b == "f32":
        precision = _PRECISION.search(line)
        if precision is None or precision[1] == "ieee":
            return None
        return "a float32 tl.dot uses TF32, which sm_75 lacks; pass input_precision='ieee' or use float16"
    if not a == b == "f16":
        return f"a tl.dot of {a} and {b}; the tensor cores of sm_75 take float16"
    return None if d == "f32" else f"a tl.dot that sums in {d}; use out_dtype=tl.float32 on sm_75"


def _list(registers: list[str]) -> str:
    return "{ " + ", ".join(registers) + " }"


def _hook(
    backend: Any = None, stages: dict[str, Any] | None = None, options: Any = None, language: Any = None, sm: int = 0
) -> tuple[str, str] | None:
    # with no arguments, from Triton 3.7 on, it is asked for its part of the cache key
    previous: Callable[..., Any] | None = _state["previous"]
    if backend is None or stages is None:
        key, digest = previous() if previous else ("", "")
        return f"{key}-{cache_key()}", f"{digest}-{cache_key()}"
    if previous:
        previous(backend, stages, options, language, sm)
    if sm == 75:
        _set_stages(backend, stages, options)
    return None


def _set_stages(backend: Any, stages: dict[str, Any], options: Any) -> None:
    stock_ttgir, stock_ptx = stages["ttgir"], stages["ptx"]

    def ttgir(src: Any, metadata: Any) -> Any:
        text = str(src)
        if "tt.dot" not in text:
            return stock_ttgir(src, metadata)
        reason = refusal(text, options.num_stages)
        if reason:
            raise TuringError(f"cannot be compiled for compute capability 7.5: {reason}")
        return backend.make_ttgir(src, metadata, options, 80)

    def ptx(src: Any, metadata: Any) -> Any:
        text = split_mma(stock_ptx(src, metadata))
        for left in ("cp.async", "m16n8k16"):
            if left in text:
                raise TuringError(f"sm_75 lacks {left}, left in the PTX; report the kernel and Triton's version")
        return text

    stages["ttgir"], stages["ptx"] = ttgir, ptx


def _key_backend() -> None:
    """Triton 3.6 leaves the hook out of its cache key: put it in through the backend's part of the key."""
    from triton.backends.nvidia.compiler import CUDABackend

    stock = CUDABackend.hash
    if getattr(stock, "turing", False):
        return

    def keyed(self: Any) -> str:
        plain: str = stock(self)
        arch = triton.knobs.runtime.override_arch or f"sm{self.target.arch}"
        return f"{plain}-{cache_key()}" if arch.startswith("sm75") else plain

    keyed.turing = True  # type: ignore[attr-defined]
    CUDABackend.hash = keyed
