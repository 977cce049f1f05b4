"""Turns the rows of bench_machine.py into a Markdown table: ours beside floor, goal and best peer.

python benchmarks/machine_table.py machine.jsonl > machine.md
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
MIB = 1 << 20
DEFAULT_CHUNK = 4 * MIB  # of floors.py

# goal -> {case of ours: at most this many times as long as the floor}
OVER_FLOOR = {
    "G1": {"unified": 1.05},
    "G4": {"unified": 1.15},
    "G6": {"unified": 1 / 0.95, "unified_verified": 1 / 0.95},
}
LOAD_GB_PER_SECOND = {"unified": 35.0, "unified_verified": 25.0}  # G5, to a GPU
LAZY_CALL_SECONDS, LAZY_SLOWDOWN = 0.050, 0.02  # G2
FIRST_SECONDS_PER_GB = 0.1  # G3
DEVICE_NBYTES = 64 * MIB  # G7

HEAD = (
    "goal", "what", "case", "s", "GB/s", "floor s", "x floor", "goal of it", "met",
    "best peer", "peer s", "peer x ours", "CPU s/GB", "n",
)  # fmt: skip


def read_rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body]]


def markdown(rows: Sequence[Row]) -> str:
    """Return the page of one run."""
    (machine,) = (row for row in rows if row["bench"] == "environment")
    measured = [row for row in rows if row["bench"] == "machine" and "skipped" not in row]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(measured, key=lambda row: str(row["goal"])):
        groups.setdefault((row["goal"], row["title"]), []).append(row)
    lines = ["## Machine", "", described(machine), ""]
    timed = [group for (goal, _), group in groups.items() if goal != "G2"]
    if body := [line for group in timed for line in time_lines(group)]:
        lines += [
            "Seconds are minima. `s` is the save or load, or the call of a background save.",
            "",
        ]
        lines += [*table(HEAD, body), ""]
    if body := [step_line(row) for group in groups.values() for row in group if "slowdown" in row]:
        head = (
            "goal",
            "case",
            "call ms",
            "steps slower",
            "longest step ms",
            "step alone ms",
            "steps",
            "met",
        )
        lines += [*table(head, body), ""]
    if body := [line for group in timed for line in first_and_memory_lines(group, machine)]:
        lines += [*table(("goal", "what", "case", "measured", "goal of it", "met"), body), ""]
    if body := [line for group in timed for line in floor_lines(group)]:
        lines += ["What the floors were chosen from:", ""]
        lines += [*table(("what", "floor", "files x threads of a rank: GB/s"), body), ""]
    lines += [
        f"- {row['title']}: {row.get('case', 'all')}: {row['skipped']}"
        for row in rows
        if "skipped" in row
    ]
    return "\n".join(lines).rstrip() + "\n"


def described(machine: Row) -> str:
    gpus = machine["gpus"]
    devices = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    others = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in machine["peers"].items()
    )
    return (
        f"{devices}, {machine['cpus']} cores, {machine['memory_bytes'] / 1e9:.0f} GB of memory, "
        f"load average {machine['load_average']:.1f} at the start, Linux {machine['kernel']}; "
        f"{'; '.join(machine['filesystems'])}; state of {machine['size']}; "
        f"Python {machine['python']}, {others}; {machine['started']}."
    )


# ---- lines of one group: the cases that ran in turn


def is_ours(row: Row) -> bool:
    return str(row["case"]).startswith("unified")


def floor_of(group: Sequence[Row]) -> Row:
    """Return the fastest floor: a limit, or a row that only moves bytes."""
    floors = [row for row in group if row["case"] == row["ratio_of"] or row["case"] == "raw_direct"]
    return min(floors, key=lambda row: row["seconds_min"])


def best_peer(group: Sequence[Row]) -> Row | None:
    floor_names = {row["ratio_of"] for row in group} | {"raw_direct"}
    peers = [row for row in group if not is_ours(row) and row["case"] not in floor_names]
    return min(peers, key=lambda row: row["seconds_min"], default=None)


def time_lines(group: Sequence[Row]) -> list[list[str]]:
    floor, peer = floor_of(group), best_peer(group)
    lines = []
    for row in filter(is_ours, group):
        seconds, gigabytes = row["seconds_min"], row["nbytes"] / 1e9
        ratio = seconds / floor["seconds_min"]
        goal, met = verdict(row, ratio=ratio, speed=gigabytes / seconds, peer=peer)
        lines.append(
            [
                row["goal"], row["title"], row["case"],
                f"{seconds:.3f}", f"{gigabytes / seconds:.2f}", f"{floor['seconds_min']:.3f}",
                f"{ratio:.2f}", goal, met,
                named(peer) if peer else "none",
                f"{peer['seconds_min']:.3f}" if peer else "",
                f"{peer['seconds_min'] / seconds:.2f}" if peer else "",
                f"{row['cpu_seconds'] / gigabytes:.2f}", str(row["n"]),
            ]
        )  # fmt: skip
    return lines


def verdict(row: Row, *, ratio: float, speed: float, peer: Row | None) -> tuple[str, str]:
    """Return the goal of a case, and whether it is met."""
    bound = OVER_FLOOR.get(row["goal"], {}).get(row["case"])
    if bound is not None:
        return f"≤ {bound:.2f} x floor", met(ratio <= bound)
    if row["goal"] == "G5" and row["device"] == "cuda" and row["case"] in LOAD_GB_PER_SECOND:
        needed = LOAD_GB_PER_SECOND[row["case"]]
        return f"≥ {needed:g} GB/s", met(speed >= needed)
    if row["goal"] == "G5" and peer is not None:
        return "best peer", met(row["seconds_min"] <= peer["seconds_min"])
    return "", ""


def met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def named(row: Row) -> str:
    chosen = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    return f"{row['case']} ({chosen})" if chosen else str(row["case"])


def step_line(row: Row) -> list[str]:
    is_met = row["call_seconds"] <= LAZY_CALL_SECONDS and row["slowdown"] <= LAZY_SLOWDOWN
    return [
        row["goal"],
        row["case"],
        f"{row['call_seconds'] * 1e3:.1f}",
        f"{row['slowdown']:.1%}",
        f"{row['longest_step_seconds'] * 1e3:.1f}",
        f"{row['alone_seconds'] * 1e3:.1f}",
        str(row["steps"]),
        met(is_met) if is_ours(row) else "",
    ]


def first_and_memory_lines(group: Sequence[Row], machine: Row) -> list[list[str]]:
    lines = []
    for row in group:
        if not is_ours(row) or row["case"] == "unified_oneshot":
            continue
        head = [row["title"], row["case"]]
        if row["goal"] == "G1":
            more = (row["first_seconds"] - row["seconds_min"]) / (row["nbytes"] / 1e9)
            measured = f"first call {more:.2f} s/GB longer"
            bound = FIRST_SECONDS_PER_GB
            lines.append(["G3", *head, measured, f"≤ {bound}", met(more <= bound)])
        if row["goal"] in ("G1", "G4", "G5"):
            lines.append(
                ["G7", *head, f"{row['peak_extra_bytes'] / MIB:.0f} MiB of a rank's host", "", ""]
            )
        if row["goal"] in ("G1", "G4", "G5") and machine["gpus"]:
            extra = row["peak_extra_device_bytes"]
            bound_text = f"≤ {DEVICE_NBYTES / MIB:.0f}"
            lines.append(
                [
                    "G7",
                    *head,
                    f"{extra / MIB:.1f} MiB of its GPU",
                    bound_text,
                    met(extra <= DEVICE_NBYTES),
                ]
            )
    return lines


def floor_lines(group: Sequence[Row]) -> list[list[str]]:
    lines = []
    for row in group:
        if "tried" in row:
            speeds = [
                f"{tried.get('files', 'all')} x {tried['threads']}"
                f"{' early' if tried.get('early') else ''}"
                f"{length_of(tried.get('chunk', DEFAULT_CHUNK))}: "
                f"{tried.get('nbytes', row['nbytes']) / tried['seconds'] / 1e9:.2f}"
                for tried in row["tried"]
            ]
            lines.append([row["title"], row["case"], ", ".join(speeds)])
    return lines


def length_of(chunk: int) -> str:
    return "" if chunk == DEFAULT_CHUNK else f" by {chunk / MIB:g} MiB"


if __name__ == "__main__":
    sys.stdout.write(markdown(read_rows(sys.argv[1])))
