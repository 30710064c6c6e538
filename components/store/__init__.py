"""The store: named, immutable-by-habit objects over a folder or an S3 bucket, behind one small interface.

Nothing above it knows which one it is. `layout` spells the keys.
"""

from holdfast.components.store import layout
from holdfast.components.store.folder import local_folder
from holdfast.components.store.interface import ConflictError, Data, ObjectInfo, Store
from holdfast.components.store.open import open_store

__all__ = ["ConflictError", "Data", "ObjectInfo", "Store", "layout", "local_folder", "open_store"]
