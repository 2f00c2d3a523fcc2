"""Power of the GPUs, sampled by a vendor's tool into `gpu_metrics.csv` (nvidia-smi or amd-smi, one row a sample)."""

import csv
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from workflow.contract import InputError
from workflow.readers.records import Floats, number

MAX_GAP_S = 3.0
"""A longer hole in the samples may hide anything; InferenceX refuses it as well."""
QUARTER_S = 900.0


@dataclass(frozen=True)
class PowerSamples:
    """Samples by GPU: seconds (Unix, or local time read as UTC where `zoned` is False) and watts, in time order."""

    gpus: dict[str, tuple[Floats, Floats]]
    zoned: bool

    def energy_j(self, start_s: float, end_s: float) -> float | str:
        """Return the energy of all GPUs over a stretch of Unix time, or why it is not known.

        Trapezoids between samples, interpolated at both ends. Samples have to reach over both ends without a hole.
        """
        total = 0.0
        for gpu, (times, watts) in self.gpus.items():
            clock = times
            if not self.zoned:
                # Tools write local time without its zone: the multiple of 15 minutes that fits the window is taken.
                clock = times - round((float(np.median(times)) - start_s) / QUARTER_S) * QUARTER_S
            if clock.size < 2 or clock[0] > start_s or clock[-1] < end_s:
                return f"the power samples of GPU {gpu} do not reach over the window"
            inside = clock[(clock > start_s) & (clock < end_s)]
            points = np.concatenate([[start_s], inside, [end_s]])
            near = clock[(clock >= start_s - MAX_GAP_S) & (clock <= end_s + MAX_GAP_S)]
            if float(np.diff(near).max(initial=0.0)) > MAX_GAP_S or float(np.diff(points).max()) > MAX_GAP_S:
                return f"the power samples of GPU {gpu} have a hole of over {MAX_GAP_S:.0f} s"
            total += float(np.trapezoid(np.interp(points, clock, watts), points))
        return total


def read_power(path: Path) -> PowerSamples:
    """Read a sample file; a row that was cut off is left out.

    Raises InputError: no such file, or no columns for time, GPU and power.
    """
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    columns = [_column(header, names) for names in (("timestamp",), ("index", "gpu"), ("power.draw", "socket_power"))]
    if None in columns:
        raise InputError(
            f"found the columns {', '.join(header) or 'none'}",
            file=path,
            line=1,
            allowed="timestamp; index or gpu; power.draw or socket_power",
            do="sample with nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv -l 1",
        )
    samples: dict[str, list[tuple[float, float]]] = {}
    zoned = True
    for row in rows[1:]:
        if len(row) < len(header):
            continue
        time_text, gpu, watts_text = (row[column or 0].strip() for column in columns)
        found = _moment(time_text)
        watts = number(watts_text.removesuffix("W").strip())
        if found is not None and math.isfinite(watts):
            zoned = zoned and found[1]
            samples.setdefault(gpu, []).append((found[0], watts))
    gpus = {}
    for gpu, pairs in samples.items():
        ordered = np.array(sorted(pairs))
        gpus[gpu] = (ordered[:, 0], ordered[:, 1])
    return PowerSamples(gpus, zoned)


def _column(header: list[str], names: tuple[str, ...]) -> int | None:
    return next((i for i, cell in enumerate(header) if cell.startswith(names)), None)


def _moment(text: str) -> tuple[float, bool] | None:
    """Return (seconds, whether they are Unix time)."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text), True
    try:
        moment = datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC).timestamp(), False
    return moment.timestamp(), True
