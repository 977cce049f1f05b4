"""Tests of trainers that fail with our drop-in by design, by reason. docs/guide/trainers.md lists
the same reasons.
"""

from __future__ import annotations

# trainer -> reason -> tests: ids of pytest, without parameters for all of a function
BY_DESIGN: dict[str, dict[str, tuple[str, ...]]] = {
    "accelerate": {
        "An attached accelerator is freed by the garbage collector": (
            "tests/test_data_loader.py::DataLoaderTester::test_ensure_dataloader_gets_cleaned_up",
        ),
    },
    "lightning": {},
    "transformers": {},
}
