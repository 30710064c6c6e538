"""The store: named objects, immutable by convention, over a folder or a bucket of S3, Google or Azure, behind one small
interface.

Code above it does not know which one it uses. `layout` defines the keys.
"""

from holdfast.store import layout
from holdfast.store.interface import ConflictError, Data, ObjectInfo, Read, Store, TooLargeError
from holdfast.store.json_reading import open_regular, read_bounded, read_file_bounded
from holdfast.store.open import in_bucket, local_folder, open_store
from holdfast.store.throttle import Throttle, throttled

__all__ = [
    "ConflictError",
    "Data",
    "ObjectInfo",
    "Read",
    "Store",
    "Throttle",
    "TooLargeError",
    "in_bucket",
    "layout",
    "local_folder",
    "open_regular",
    "open_store",
    "read_bounded",
    "read_file_bounded",
    "throttled",
]
