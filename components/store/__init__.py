"""The store: named, immutable-by-habit objects over a folder or an S3 bucket, behind one small interface.

Nothing above it knows which one it is. `layout` spells the keys.
"""

from components.store import layout
from components.store.folder import local_folder
from components.store.interface import ConflictError, Data, ObjectInfo, Store
from components.store.open import open_store

__all__ = ["ConflictError", "Data", "ObjectInfo", "Store", "layout", "local_folder", "open_store"]
