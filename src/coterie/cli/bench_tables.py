"""Tables of benchmarks, as the command line prints them."""

from __future__ import annotations

from typing import Any

from coterie.cli.show import console, in_digits, table_of
from coterie.core.card import in_bytes


def speeds(rows: list[dict[str, Any]]) -> None:
    """Print the speed benchmark: a table per workload, with one row per executor or library.

    Args:
        rows: The measurements.
    """
    for work in dict.fromkeys(r["workload"] for r in rows):
        console.print(f"\n{work}", style="bold")
        table = table_of(
            "way", ">seconds", ">times the loop", ">floors", ">peak MiB", ">rel. difference", ">other labels"
        )
        for r in (r for r in rows if r["workload"] == work):
            peak = "" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
            gap = "" if r["max_rel_diff"] is None else f"{r['max_rel_diff']:.0e}"
            ratios = f"{r['loop_ratio']:.1f}", f"{r['floor_ratio']:.1f}"
            labels = "" if r["other_labels"] is None else str(r["other_labels"])
            table.add_row(r["way"], f"{r['seconds']:.4f}", *ratios, peak, gap, labels)
        console.print(table)


def scales(rows: list[dict[str, Any]], slope: float) -> None:
    """Print the time and memory of a round, one row per number of clients.

    Args:
        rows: The measurements.
        slope: The power of the number of clients with which the time grows.
    """
    table = table_of(">clients", ">seconds", ">mixed effects", ">peak MiB", ">file MiB", ">s to write", ">ARI")
    for r in rows:
        peak = "" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        seconds = f"{r['seconds']:.4f}", f"{r['effects_seconds']:.4f}"
        files = f"{r['file_mib']:.1f}", f"{r['write_seconds']:.2f}"
        table.add_row(f"{r['clients']:,}", *seconds, peak, *files, in_digits(r["ari"]))
    console.print(table)
    console.print(f"from 1,000 clients on, seconds grow with the number of clients to the power {slope:.2f}")


def sessions(rows: list[dict[str, Any]]) -> None:
    """Print the time and bytes of sessions of the secure sum, one row per size.

    Args:
        rows: The measurements.
    """
    table = table_of(">clients", ">numbers per slot", ">seconds", ">kB up", ">kB down", ">kB in the open")
    for r in rows:
        sent = (f"{r[kind]:.0f}" for kind in ("up_kb", "down_kb", "open_kb"))
        table.add_row(f"{r['clients']}", f"{r['numbers']:,}", f"{r['seconds']:.2f}", *sent)
    console.print(table)


def federations(rows: list[dict[str, Any]]) -> None:
    """Print the time and bytes of a round of a real federation, one row per number of nodes.

    Args:
        rows: The measurements.
    """
    table = table_of(">nodes", "resident workers", ">s/round", ">slowest", ">counted", ">on the wire", ">more")
    for r in rows:
        more = f"{100 * (r['wire_bytes'] / r['counted_bytes'] - 1):.1f} %"
        seconds = f"{r['seconds']:.2f}", f"{r['slowest']:.2f}"
        sizes = in_bytes(r["counted_bytes"]), in_bytes(r["wire_bytes"])
        table.add_row(str(r["nodes"]), "yes" if r["workers"] else "no", *seconds, *sizes, more)
    console.print(table)


def attacks(rows: list[dict[str, Any]]) -> None:
    """Print the accuracy of honest clients, one line per attack and share of hostile clients, one column per rule.

    Args:
        rows: The measurements.
    """
    rules = list(dict.fromkeys(r["rule"] for r in rows))
    table = table_of("attack", ">hostile", *(f">{rule}" for rule in rules))
    for attack, share in dict.fromkeys((r["attack"], r["hostile"]) for r in rows):
        found = {r["rule"]: r["accuracy"] for r in rows if (r["attack"], r["hostile"]) == (attack, share)}
        table.add_row(attack, f"{100 * share:.0f} %", *(f"{found[rule]:.3f}" for rule in rules))
    console.print(table)
