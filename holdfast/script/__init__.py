"""Training scripts: a user's own loop, run as a rank of a managed launch, with state that is saved and restored.

`holdfast.session()` gives a script its `Session`. The state of its objects becomes boxes of the checkpoint format, by
name. Nothing is pickled.
"""
