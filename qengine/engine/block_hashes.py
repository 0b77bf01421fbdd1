"""Names of block content: sha256 over the parent's name and the block's token ids, from a root on.

Equal names mean equal tokens from the beginning on under the same root, and nothing that a user can choose (a token
id, a salt) can be taken for something else: the first byte of what is hashed tells the kinds apart.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq


def root_hash(salt: bytes) -> bytes:
    """The parent of a chain's first block, shared by all prompts with this salt."""
    return hashlib.sha256(b"s" + salt).digest()


def private_root(number: int) -> bytes:
    """The parent of a first block that no other prompt shares, where prefix caching is off."""
    return hashlib.sha256(b"p" + struct.pack("<Q", number)).digest()


def block_hash(parent: bytes, token_ids: Seq[int]) -> bytes:
    """The name of a full block of `token_ids` that follows the block with name `parent`."""
    return hashlib.sha256(b"b" + parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()
