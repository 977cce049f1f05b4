"""Turns result lines into Markdown tables with targets.

python benchmarks/report.py results/*.jsonl > report.md
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Group = dict[str, Row]  # case -> row, of one launch

MIB = 1 << 20
SIZES = ("1GiB", "4GiB")  # smaller states have no target for speed: fixed costs dominate
VERIFIED_SHARE = 0.99
EXTRA_BYTES = 256 * MIB  # target: memory of a save or load beyond the state, per rank

SAVE_OVER_RAW = {
    ("4GiB", "dim0"): 1.15,
    ("4GiB", "inner"): 1.35,
    ("1GiB", "dim0"): 1.25,
    ("1GiB", "inner"): 1.45,
}
SAVE_FASTER = {
    "dcp": {"dim0": 1.4, "inner": 1.2},
    "dcp_hf_consolidated": {"dim0": 6.0, "inner": 5.0},
}
LOAD_FASTER_THAN_DCP = 2.0
LOAD_OVER_HF = {"unified": 1.1, "unified_verified": 1.6}
# how long training stands still, over a copy of the bytes that the rank writes
BLOCKED_OVER_COPY = {"unified": 1.3, "unified_lazy": 0.05}
THROTTLED_OVER_FREE = 1.1
STEPS_OVER_ALONE = 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """One target compared with one launch. A ratio of times is the median over the rounds."""

    target: str
    value: float
    bound: float
    at_most: bool

    def is_met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound


# ---- targets


def times(row: Row, other: Row) -> float:
    """Return how many times as long as `other` this row took."""
    return float(
        statistics.median(a / b for a, b in zip(row["rounds"], other["rounds"], strict=True))
    )


def load_over_raw(row: Row) -> float:
    """Return the bound of a load over raw.

    Files are contiguous for dim0; for inner, each rank's bytes are in short runs whatever the
    layout of the save.
    """
    verified = row["case"] == "unified_verified"
    if row["kind"] == "inner":
        return 2.5 if verified else 2.0
    if row["scenario"] != "same":
        return 1.8 if verified else 1.4
    if not verified:
        return 1.15
    return 1.3 if row["ranks"] == 1 else 1.75


def save_findings(group: Group) -> list[Finding]:
    if "unified" not in group:
        return []
    unified = group["unified"]
    result = []
    if (key := (unified["size"], unified["kind"])) in SAVE_OVER_RAW:
        result.append(
            Finding(
                "durable merged save, over raw",
                times(unified, group["raw"]),
                SAVE_OVER_RAW[key],
                at_most=True,
            )
        )
    for peer, needed in SAVE_FASTER.items():
        if peer in group:
            result.append(
                Finding(
                    f"as fast as {peer}",
                    times(group[peer], unified),
                    needed[unified["kind"]],
                    at_most=False,
                )
            )
    return result


def load_findings(group: Group) -> list[Finding]:
    result = []
    for case, over_hf in LOAD_OVER_HF.items():
        if case not in group:
            continue
        row = group[case]
        result.append(
            Finding(f"{case}, over raw", times(row, group["raw"]), load_over_raw(row), at_most=True)
        )
        if "dcp_hf" in group:
            result.append(
                Finding(f"{case}, over dcp_hf", times(row, group["dcp_hf"]), over_hf, at_most=True)
            )
        if "dcp" in group and case == "unified":
            result.append(
                Finding(
                    f"{case}, as fast as dcp",
                    times(group["dcp"], row),
                    LOAD_FASTER_THAN_DCP,
                    at_most=False,
                )
            )
    return result


def blocked_findings(group: Group) -> list[Finding]:
    return [
        Finding(
            f"{case}, blocked over memcpy",
            times(group[case], group["memcpy"]),
            needed,
            at_most=True,
        )
        for case, needed in BLOCKED_OVER_COPY.items()
        if case in group
    ]


def throttled_findings(group: Group) -> list[Finding]:
    ours = [row for case, row in group.items() if case.startswith("unified")]
    return [
        Finding(
            f"{row['case']}, throttled over not", row["ratio"], THROTTLED_OVER_FREE, at_most=True
        )
        for row in ours
    ]


def steps_findings(group: Group) -> list[Finding]:
    ours = [row for case, row in group.items() if case.startswith("unified")]
    return [
        Finding(f"{row['case']}, steps kept", row["ratio"], STEPS_OVER_ALONE, at_most=False)
        for row in ours
    ]


def memory_findings(group: Group) -> list[Finding]:
    ours = [
        row
        for case, row in group.items()
        if case.startswith("unified") and "peak_extra_bytes" in row
    ]
    return [
        Finding(
            f"{row['case']}, extra MiB of a rank",
            row["peak_extra_bytes"] / MIB,
            EXTRA_BYTES / MIB,
            at_most=True,
        )
        for row in ours
    ]


def verified_findings(group: Group) -> list[Finding]:
    """Ranks together read every block whole, so all bytes can be verified, and must be."""
    ours = [row for case, row in group.items() if case == "unified_verified"]
    return [
        Finding(
            f"{row['case']}, share of bytes",
            row["verified_bytes"] / row["nbytes"],
            VERIFIED_SHARE,
            at_most=False,
        )
        for row in ours
    ]


def findings(group: Group) -> list[Finding]:
    first = next(iter(group.values()))
    if first["bench"] == "async_throttled":
        return throttled_findings(group)  # the size does not matter: both sides have it
    speed = {
        "save": save_findings,
        "load": load_findings,
        "async": blocked_findings,
        "async_steps": steps_findings,
    }[first["bench"]]
    result = speed(group) if first["size"] in SIZES else []
    return result + (
        memory_findings(group) + verified_findings(group)
        if first["bench"] in ("save", "load")
        else []
    )


# ---- tables


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body]]


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def common_cells(row: Row) -> list[str]:
    spread = f"{row['seconds_median']:.3f} ({row['seconds_min']:.3f}–{row['seconds_max']:.3f})"
    ratio = (
        f"{row['ratio']:.2f} ({row.get('ratio_of_mins', row['ratio']):.2f})"
        if "ratio" in row
        else ""
    )
    extra = f"{row['peak_extra_bytes'] / MIB:.0f}" if "peak_extra_bytes" in row else ""
    return [
        row["case"],
        spread,
        f"{row['nbytes'] / row['seconds_median'] / 1e9:.2f}",
        ratio,
        seconds(row.get("first_seconds")),
        extra,
    ]


def save_cells(row: Row) -> list[str]:
    """Return the cells of a blocking save: training stands still for all of it."""
    median = row["seconds_median"]
    written = f"{row['bytes_written'] / row['nbytes']:.2f}" if "bytes_written" in row else ""
    disk = f"{row['folder_bytes'] / row['nbytes']:.2f}" if "folder_bytes" in row else ""
    durable, loadable = median if row["durable"] else None, median if row["hf_loadable"] else None
    return [
        *common_cells(row),
        seconds(durable),
        seconds(loadable),
        seconds(median),
        written,
        disk,
        settings(row),
    ]


def load_cells(row: Row) -> list[str]:
    verified = f"{row['verified_bytes'] / row['nbytes']:.2f}" if "verified_bytes" in row else ""
    read = row["bytes_read_disk"] if row["cache"] == "cold" else row["bytes_read"]
    return [*common_cells(row), verified, f"{read / row['nbytes']:.2f}", settings(row)]


def spread_cell(row: Row) -> str:
    return f"{row['seconds_median']:.3f} ({row['seconds_min']:.3f}–{row['seconds_max']:.3f})"


def blocked_cells(row: Row) -> list[str]:
    ratio = f"{row['ratio']:.2f} ({row['ratio_of_mins']:.2f})"
    waited = f"{row['waited_median']:.4f}" if "waited_median" in row else ""
    compute = f"{row['compute_kept']:.2f}" if "compute_kept" in row else ""
    extra = f"{row['peak_extra_bytes'] / MIB:.0f}" + (
        f" + {row['daemon_bytes'] / MIB:.0f}" if "daemon_bytes" in row else ""
    )
    durations = [seconds(row["first_seconds"]), waited, compute, seconds(row.get("durable_median"))]
    return [row["case"], spread_cell(row), ratio, *durations, extra, settings(row)]


def throttled_cells(row: Row) -> list[str]:
    free = statistics.median(row["unthrottled_rounds"])
    return [
        row["case"],
        seconds(free),
        spread_cell(row),
        f"{row['ratio']:.2f}",
        seconds(row["durable_median"]),
        settings(row),
    ]


def steps_cells(row: Row) -> list[str]:
    rates = [f"{row['alone']:.1f}", f"{row['beside']:.1f}"]
    return [
        row["case"],
        *rates,
        f"{row['ratio']:.2f}",
        f"{row['ratio_with_calls']:.2f}",
        settings(row),
    ]


def settings(row: Row) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.get("settings", {}).items())


COMMON_HEAD = [
    "case",
    "s, median (min–max)",
    "GB/s",
    "x raw (of mins)",
    "first s",
    "extra MiB/rank",
]
SAVE_HEAD = [
    *COMMON_HEAD,
    "until durable s",
    "until HF-loadable s",
    "training stood still s",
    "written x",
    "disk x",
    "settings",
]
LOAD_HEAD = [*COMMON_HEAD, "verified x", "read x", "settings"]
BLOCKED_TIMES = ["first s", "of it in the step s", "compute kept", "until durable s"]
BLOCKED_HEAD = [
    "case",
    "training stood still s, median (min–max)",
    "x memcpy (of mins)",
    *BLOCKED_TIMES,
    "extra MiB/rank",
    "settings",
]
THROTTLED_HEAD = [
    "case",
    "stood still s",
    "at 100 MB/s",
    "ratio",
    "until durable s, at 100 MB/s",
    "settings",
]
STEPS_HEAD = ["case", "steps/s alone", "beside a save", "kept", "kept, calls counted", "settings"]
COLUMNS = {
    "save": (SAVE_HEAD, save_cells),
    "load": (LOAD_HEAD, load_cells),
    "async": (BLOCKED_HEAD, blocked_cells),
    "async_throttled": (THROTTLED_HEAD, throttled_cells),
    "async_steps": (STEPS_HEAD, steps_cells),
}


def title(row: Row) -> str:
    where = (
        f"{row['bench']}: {row['size']}, {row['ranks']} "
        f"rank{'s' if row['ranks'] > 1 else ''}, {row['kind']}"
    )
    if row["bench"] != "load":
        return f"{where}, {row['ops']} steps" if "ops" in row else where
    return (
        f"{where}, {row['scenario']} (saved as {row['saved_kind']} by {row['saved_ranks']}), "
        f"{row['cache']}"
    )


def verdict(finding: Finding) -> list[str]:
    sign = "≤" if finding.at_most else "≥"
    return [
        finding.target,
        f"{finding.value:.2f}",
        f"{sign} {finding.bound:g}",
        "yes" if finding.is_met() else "**no**",
    ]


def section(group: Group) -> list[str]:
    first = next(iter(group.values()))
    head, cells = COLUMNS[first["bench"]]
    lines = [f"### {title(first)}", "", *table(head, map(cells, group.values()))]
    if results := findings(group):
        lines += ["", *table(["target", "measured", "bound", "met"], map(verdict, results))]
    lines += ["", f"Run {first['run']}, load average {first['load_average']:.1f} at its start.", ""]
    return lines


def overview(groups: Iterable[Group]) -> list[str]:
    missed = [
        [title(next(iter(group.values()))), *verdict(finding)[:3]]
        for group in groups
        for finding in findings(group)
        if not finding.is_met()
    ]
    total = sum(len(findings(group)) for group in groups)
    lines = [f"{total - len(missed)} of {total} targets met.", ""]
    return (
        [*lines, *table(["where", "target missed", "measured", "bound"], missed), ""]
        if missed
        else lines
    )


# ---- reading


def read_rows(paths: Iterable[str]) -> list[Row]:
    return [
        json.loads(line)
        for path in paths
        for line in Path(path).read_text().splitlines()
        if line.startswith("{")
    ]


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """Group the rows of each launch, because only they share a machine.

    Of repeated launches, the latest counts.
    """
    launches: dict[tuple[object, ...], dict[str, Group]] = {}
    for row in rows:
        # simulations (plan, inventory, shared_reads) have no rival and no table; bench_machine.py
        # writes its own
        if "run" in row and row["bench"] not in ("environment", "machine"):
            key = tuple(
                row.get(name)
                for name in ("bench", "size", "kind", "ranks", "scenario", "cache", "ops")
            )
            launches.setdefault(key, {}).setdefault(row["run"], {})[row["case"]] = row
    return [runs[max(runs)] for runs in launches.values()]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", help="JSON lines files that the benchmarks wrote")
    rows = read_rows(parser.parse_args(arguments).results)
    groups = group_rows(rows)
    machines = [row for row in rows if row["bench"] == "environment"]
    lines = ["## Benchmarks", "", *overview(groups)]
    for group in groups:
        lines += section(group)
    lines += ["Machine: " + json.dumps(machine) + "\n" for machine in machines[-1:]]
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
