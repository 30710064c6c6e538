"""User code: bundles that travel by digest, and functions that are loaded from them.

The digest of a bundle is on the command line of each job. Code runs only from a folder whose bytes have that digest.
"""

from holdfast.code.bundle import Bundle, fetch_code, make_bundle, publish
from holdfast.code.closure import role_digest
from holdfast.code.load import load_function

__all__ = ["Bundle", "fetch_code", "load_function", "make_bundle", "publish", "role_digest"]
