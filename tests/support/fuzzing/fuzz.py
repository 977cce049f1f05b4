"""Fuzzes one target with atheris, guided by the coverage of the package.

`python -m tests.support.fuzzing.fuzz TARGET --corpus FOLDER --seconds N [--seed N]`

New inputs that reach new code are added to FOLDER/TARGET. Inputs that fail go to
FOLDER/failures/TARGET, one for each kind of failure, and the fuzzing goes on.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import traceback
from pathlib import Path

import atheris


def main() -> None:
    """Fuzz until the time is over; exit with 1 if an input failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with atheris.instrument_imports(include=["unified_ckpt"], enable_loader_override=False):
        from tests.support.fuzzing import mutators, targets

    folder, failures = arguments.corpus / arguments.target, arguments.corpus / "failures"
    failures.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, int] = {}
    for _, data in targets.inputs(arguments.target, arguments.corpus):
        _is_right(targets, arguments.target, data, known, failures)  # imports what readers import
    _limit_memory()

    def test_one_input(data: bytes) -> None:
        _is_right(targets, arguments.target, bytes(data), known, failures)

    def mutate(data: bytearray, max_size: int, seed: int) -> bytes:
        changed = mutators.mutate(
            bytes(data), random.Random(seed), lambda part: atheris.Mutate(part, len(part) + 64)
        )
        return changed if len(changed) <= max_size else bytes(data)

    flags = [f"-max_total_time={arguments.seconds}", f"-seed={arguments.seed}", "-timeout=20"]
    flags += ["-rss_limit_mb=6000", "-max_len=65536", "-len_control=0", "-print_final_stats=1"]
    flags += [f"-artifact_prefix={failures}/"]
    atheris.Setup([sys.argv[0], *flags, str(folder)], test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


def _is_right(
    targets: object, target: str, data: bytes, known: dict[str, int], failures: Path
) -> None:
    try:
        targets.run(target, data)  # type: ignore[attr-defined]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        kind = targets.signature(error)  # type: ignore[attr-defined]
        known[kind] = known.get(kind, 0) + 1
        if known[kind] == 1:
            targets.add_input(target, data, failures)  # type: ignore[attr-defined]
            print(f"FAILURE {target}: {kind}: {error!s:.300}", file=sys.stderr, flush=True)
            traceback.print_exception(error, limit=-6)


def _limit_memory() -> None:
    """Turn an allocation of gigabytes into a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
