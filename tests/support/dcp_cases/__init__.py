"""The cases of DCP, by area."""

_NAMES = (
    *("values", "calls", "plugins", "background", "dtensors", "sharded_tensors"),
    *("models", "optimizers", "reports"),
)
AREAS = [f"{__name__}.{name}" for name in _NAMES]
