"""One row that an entry can be found by, and its bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from store.codec import CHECK, seal, unseal
from store.errors import StoreError

if TYPE_CHECKING:
    import numpy as np  # a reader of counts and logs has no need of it

LENGTHS = struct.Struct("=II")  # of the head and of the label


@dataclass(frozen=True, eq=False)
class Vector:
    """One row that an entry can be found by.

    Attributes:
        kind: Vectors are compared with those of their kind only; chai has `entity` and `prompt`.
        label: What the vector stands for, such as an entity's text.
        values: A unit vector [D].
    """

    kind: str
    label: str
    values: np.ndarray


@dataclass(frozen=True)
class Match:
    """An entry's vector near a query: its entry, what the vector stands for, and the cosine similarity."""

    id: str
    label: str
    similarity: float


def pack_vector(namespace: str, vector: Vector) -> bytes:
    """The record: checksum, lengths, namespace and kind, label, float32 values.

    Raises:
        StoreError: the vector is no row of finite numbers.
    """
    import numpy as np

    values = np.asarray(vector.values, np.float32)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise StoreError(f"the {vector.kind} vector {vector.label!r} is no row of finite numbers; nothing was stored")
    head, label = json.dumps([namespace, vector.kind]).encode(), vector.label.encode()
    return seal(LENGTHS.pack(len(head), len(label)) + head + label + values.tobytes())


def unpack_vector(record: bytes) -> tuple[str, Vector]:
    """The namespace and the vector.

    Raises:
        StoreError: the checksum is wrong.
    """
    import numpy as np

    body = unseal(record)
    head, label = LENGTHS.unpack_from(body)
    at = LENGTHS.size + head
    namespace, kind = parse(body[LENGTHS.size : at])
    return namespace, Vector(kind, body[at : at + label].decode(), np.frombuffer(body, np.float32, offset=at + label))


@lru_cache(maxsize=1024)
def parse(head: bytes) -> tuple[str, str]:
    """Namespace and kind. A store has few of them and many vectors."""
    namespace, kind = json.loads(head)
    return namespace, kind


def peek_values(record: bytes, width: int) -> np.ndarray:
    """Only the numbers [D] of a record that is known to be sound and to have this width."""
    import numpy as np

    return np.frombuffer(record, np.float32, offset=len(record) - 4 * width)


def peek_label(record: bytes) -> str:
    """Only the label of a record that is known to be sound."""
    head, label = LENGTHS.unpack_from(record, CHECK)
    at = CHECK + LENGTHS.size + head
    return record[at : at + label].decode()
