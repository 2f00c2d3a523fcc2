from datetime import datetime, timedelta

import pytest

from workflow.contract import InputError
from workflow.metrics import Context, measure
from workflow.readers.power_samples import read_power

HEADER = "timestamp, index, power.draw [W], temperature.gpu\n"


def write(path, rows, header=HEADER):
    path.write_text(header + "".join(f"{', '.join(map(str, row))}\n" for row in rows))
    return path


def local(second):
    return f"{datetime(2026, 11, 30, 2, 53, 20) + timedelta(seconds=second):%Y/%m/%d %H:%M:%S}.000"  # noqa: DTZ001


def test_energy_is_interpolated_at_both_ends(tmp_path):
    found = read_power(write(tmp_path / "p.csv", [(1000 + i, 0, f"{100 + 10 * i} W", 40) for i in range(11)]))
    # Power is 100 W + 10 W/s: from 2.5 s to 7.5 s the mean is 150 W.
    assert found.energy_j(1002.5, 1007.5) == pytest.approx(750)


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (range(5, 20), "do not reach over"),
        (range(8), "do not reach over"),
        ([0, 1, 2, 7, 8, 9, 10, 11], "hole of over 3 s"),
    ],
)
def test_samples_that_do_not_cover_the_window_give_no_number(tmp_path, seconds, reason):
    found = read_power(write(tmp_path / "p.csv", [(1000 + i, 0, "100 W", 40) for i in seconds]))
    assert reason in found.energy_j(1001.0, 1010.0)


def test_a_truncated_row_and_unsupported_values_are_left_out(tmp_path):
    path = write(tmp_path / "p.csv", [(1000 + i, 0, "100 W", 40) for i in range(5)] + [(1003.5, 0, "[N/A]", 40)])
    path.write_text(path.read_text() + "1005, 0")
    assert read_power(path).energy_j(1000.0, 1004.0) == pytest.approx(400)


def test_a_file_without_power_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="allowed: timestamp; index or gpu"):
        read_power(write(tmp_path / "p.csv", [], "timestamp, name\n"))


def test_energy_per_token_from_local_times_two_hours_off(attempt):
    rows = [(local(i), gpu, "300 W", 40) for i in range(-2, 105) for gpu in (0, 1)]
    write(attempt.folder / "gpu_metrics.csv", rows)
    found = measure(attempt.write(), Context(gpus=2)).values
    assert found["power_mean_w"].value == pytest.approx(600)
    assert found["energy_j_per_output_token"].value == pytest.approx(60_000 / 1000)
    wrong = measure(attempt.folder, Context(gpus=8)).values["power_mean_w"]
    assert wrong.null_reason == "2 GPUs were sampled, 8 served"
