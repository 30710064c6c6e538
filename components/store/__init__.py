"""The store: named, immutable-by-habit objects over a folder or an S3 bucket, behind one small interface.

Nothing above it knows which one it is. `layout` spells the keys.
"""

from holdfast.components.store import layout
from holdfast.components.store.bounded_read import open_regular, read_bounded, read_file_bounded
from holdfast.components.store.folder import local_folder
from holdfast.components.store.interface import ConflictError, Data, ObjectInfo, Read, Store, TooLargeError
from holdfast.components.store.open import open_store
from holdfast.components.store.throttle import Throttle, throttled

__all__ = [
    "ConflictError",
    "Data",
    "ObjectInfo",
    "Read",
    "Store",
    "Throttle",
    "TooLargeError",
    "layout",
    "local_folder",
    "open_regular",
    "open_store",
    "read_bounded",
    "read_file_bounded",
    "throttled",
]
