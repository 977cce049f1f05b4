"""Result lines in, Markdown tables with targets out.

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
SIZES = ("1GiB", "4GiB")  # below, fixed costs weigh more than bytes: no target for speed
VERIFIED_SHARE = 0.99
EXTRA_BYTES = 256 * MIB  # target: what a save or load may take besides the state, on each rank

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
BLOCKED_OVER_COPY = {
    "unified": 1.3,
    "unified_lazy": 0.05,
}  # training stands still, over a copy of the bytes that the rank writes
THROTTLED_OVER_FREE = 1.1
STEPS_KEPT = 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """One target held against one launch. A ratio of times is the median of its values of each
    round.
    """

    what: str
    found: float
    needed: float
    at_most: bool

    def met(self) -> bool:
        return self.found <= self.needed if self.at_most else self.found >= self.needed


# ---- targets


def times(mine: Row, other: Row) -> float:
    """How many times as long as `other` this took."""
    return float(
        statistics.median(a / b for a, b in zip(mine["rounds"], other["rounds"], strict=True))
    )


def load_over_raw(row: Row) -> float:
    """Files are contiguous for dim0; for inner, each rank's bytes lie in short runs whatever layout
    saved them.
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
    mine = group["unified"]
    found = []
    if (key := (mine["size"], mine["kind"])) in SAVE_OVER_RAW:
        found.append(
            Finding(
                "durable merged save, over raw",
                times(mine, group["raw"]),
                SAVE_OVER_RAW[key],
                at_most=True,
            )
        )
    for peer, needed in SAVE_FASTER.items():
        if peer in group:
            found.append(
                Finding(
                    f"as fast as {peer}",
                    times(group[peer], mine),
                    needed[mine["kind"]],
                    at_most=False,
                )
            )
    return found


def load_findings(group: Group) -> list[Finding]:
    found = []
    for case, over_hf in LOAD_OVER_HF.items():
        if case not in group:
            continue
        mine = group[case]
        found.append(
            Finding(
                f"{case}, over raw", times(mine, group["raw"]), load_over_raw(mine), at_most=True
            )
        )
        if "dcp_hf" in group:
            found.append(
                Finding(f"{case}, over dcp_hf", times(mine, group["dcp_hf"]), over_hf, at_most=True)
            )
        if "dcp" in group and case == "unified":
            found.append(
                Finding(
                    f"{case}, as fast as dcp",
                    times(group["dcp"], mine),
                    LOAD_FASTER_THAN_DCP,
                    at_most=False,
                )
            )
    return found


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
        Finding(f"{row['case']}, steps kept", row["ratio"], STEPS_KEPT, at_most=False)
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
    """The ranks together read every block whole, so all bytes can be verified, and must be for the
    time to count.
    """
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
        return throttled_findings(group)  # a ratio of equals, at any size
    speed = {
        "save": save_findings,
        "load": load_findings,
        "async": blocked_findings,
        "async_steps": steps_findings,
    }[first["bench"]]
    found = speed(group) if first["size"] in SIZES else []
    return found + (
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
    """A blocking save: training stands still for all of it."""
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
    kept = f"{row['compute_kept']:.2f}" if "compute_kept" in row else ""
    extra = f"{row['peak_extra_bytes'] / MIB:.0f}" + (
        f" + {row['daemon_bytes'] / MIB:.0f}" if "daemon_bytes" in row else ""
    )
    times_of = [seconds(row["first_seconds"]), waited, kept, seconds(row.get("durable_median"))]
    return [row["case"], spread_cell(row), ratio, *times_of, extra, settings(row)]


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
        finding.what,
        f"{finding.found:.2f}",
        f"{sign} {finding.needed:g}",
        "yes" if finding.met() else "**no**",
    ]


def section(group: Group) -> list[str]:
    first = next(iter(group.values()))
    head, cells = COLUMNS[first["bench"]]
    lines = [f"### {title(first)}", "", *table(head, map(cells, group.values()))]
    if found := findings(group):
        lines += ["", *table(["target", "found", "needed", "met"], map(verdict, found))]
    lines += ["", f"Run {first['run']}, load average {first['load_average']:.1f} at its start.", ""]
    return lines


def overview(groups: Iterable[Group]) -> list[str]:
    missed = [
        [title(next(iter(group.values()))), *verdict(one)[:3]]
        for group in groups
        for one in findings(group)
        if not one.met()
    ]
    total = sum(len(findings(group)) for group in groups)
    lines = [f"{total - len(missed)} of {total} targets met.", ""]
    return (
        [*lines, *table(["where", "target missed", "found", "needed"], missed), ""]
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
    """Rows of one launch belong together, for only they saw the same machine; of repeated launches
    the newest stands.
    """
    launches: dict[tuple[object, ...], dict[str, Group]] = {}
    for row in rows:
        if (
            "run" in row and row["bench"] != "environment"
        ):  # simulations (plan, inventory, shared_reads) have no rival: they are read as they are
            key = tuple(
                row.get(name)
                for name in ("bench", "size", "kind", "ranks", "scenario", "cache", "ops")
            )
            launches.setdefault(key, {}).setdefault(row["run"], {})[row["case"]] = row
    return [runs[max(runs)] for runs in launches.values()]


def main(arguments: Sequence[str]) -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("results", nargs="+", help="JSON lines files that the benchmarks wrote")
    rows = read_rows(made.parse_args(arguments).results)
    groups = group_rows(rows)
    machines = [row for row in rows if row["bench"] == "environment"]
    lines = ["## Benchmarks", "", *overview(groups)]
    for group in groups:
        lines += section(group)
    lines += ["Machine: " + json.dumps(machine) + "\n" for machine in machines[-1:]]
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
