"""Training engines, one folder each, behind the Protocol in `holdfast.components.train.engine`."""
