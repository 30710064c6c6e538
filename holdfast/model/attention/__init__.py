"""Attention inside packed documents, causal, without a T x T tensor.

`packed.packed_attention` is the function for every path of training. `segments` says where documents lie. Two kernels
compute it, `tiles` and `flash`, behind the interface of `kernel`. Import from the modules.

Shape suffixes: B batch, T tokens, S positions of keys, H query heads, G key/value heads, K width of queries and keys,
V width of values, N segments.
"""
