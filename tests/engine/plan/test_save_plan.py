from __future__ import annotations

import pytest

from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.engine.plan.file_layout import lay_out_group
from unified_ckpt.engine.plan.holders import Declarations, Membership
from unified_ckpt.engine.plan.save_plan import checked_groups, list_group_files

TENSORS = 160  # of 512 MB in the model, of 1024 MB as moments


def table(numbers: range, ranks: int, *, dim: int = 0, encoding: str = "") -> list[TensorDecl]:
    sharding = Sharding((ShardDim(dim, ranks, 1),) if ranks > 1 else ())
    return [
        TensorDecl(part, f"{number:03}{state}", TensorSpec(dtype, (8000, 32_000)), sharding, form)
        for part, state, dtype, form in (
            ("model", "", "BF16", ""),
            ("optimizer", "/exp_avg_sq", "F32", encoding),
        )
        for number in numbers
    ]


def files_of(tables: list[list[TensorDecl]], ranks: int) -> set[tuple[str, tuple[str, ...]]]:
    """Return the files as the members of each group compute them, and the tensors of each.

    Each table has `ranks` ranks.
    """
    declarations = Declarations(
        {str(n): decls for n, decls in enumerate(tables)},
        {str(n): range(n * ranks, (n + 1) * ranks) for n in range(len(tables))},
    )
    groups = checked_groups(declarations)
    layouts = [
        lay_out_group(Membership(plan.group.index, plan.holders, plan.group.decls, plan.group_info))
        for plan in list_group_files(groups, declarations, max_file_bytes=None)[0]
    ]
    return {
        (file.name, tuple(layout.stored.tensors[index].fqn for index in file.offsets))
        for layout in layouts
        for file in layout.files
    }


def test_files_follow_from_the_bytes_of_all_groups() -> None:
    """A part of 82 or 164 GB has files of two tensors; that of one stage alone would not."""
    files = files_of([table(range(TENSORS), 1)], 1)
    assert files == {
        (f"{part}-{n + 1:05}-of-00080.safetensors", (f"{2 * n:03}{end}", f"{2 * n + 1:03}{end}"))
        for n in range(80)
        for part, end in (("model", ""), ("optimizer", "/exp_avg_sq"))
    }
    assert files_of([table(range(TENSORS), 8, dim=1)], 8) == files
    assert files_of([table(range(40 * n, 40 * n + 40), 2) for n in range(4)], 2) == files


@pytest.mark.parametrize(("encoding", "files"), [("", 80), ("log-4", 54)])
def test_files_follow_from_stored_bytes(encoding: str, files: int) -> None:
    """23 GB of codes and scales are in files of up to 512 MB."""
    names = {name for name, _ in files_of([table(range(TENSORS), 1, encoding=encoding)], 1)}
    assert sum(name.startswith("optimizer") for name in names) == files
