"""Samples of a replay as the workflow keeps them, cut at the edges of a phase."""

import gzip

import pytest

from workflow.contract import DamagedFile
from workflow.readers import prometheus_text
from workflow.readers.aliases import find
from workflow.readers.prometheus_text import read_around, read_pair
from workflow.watch import append_gzip, sample

PHASE_NS = (100_000_000_000, 200_000_000_000)


def samples(tmp_path, *moments_s):
    """Write a sample at each moment, whose counter is its time."""
    path = tmp_path / "lmcache-0-http.samples.prom.gz"
    for at in moments_s:
        append_gzip(
            path, sample(at, b"# TYPE lmcache_mp_lookup_hit_tokens counter\nlmcache_mp_lookup_hit_tokens_total %d" % at)
        )
    return path


def taken(found):
    return [None if one is None else next(iter(one.counters.values())) for one in found]


@pytest.mark.parametrize(
    ("moments_s", "expected"),
    [
        ((80, 99, 101, 150, 199, 201, 220), [99, 201]),
        ((100, 200), [100, 200]),
        ((101, 199), [None, None]),
        ((80, 150), [80, None]),
        ((150, 220), [None, 220]),
    ],
)
@pytest.mark.parametrize("block_bytes", [7, 1 << 16])
def test_the_last_sample_before_a_phase_and_the_first_after_it(tmp_path, monkeypatch, moments_s, expected, block_bytes):
    monkeypatch.setattr(prometheus_text, "BLOCK_BYTES", block_bytes)
    assert taken(read_around(samples(tmp_path, *moments_s), PHASE_NS)) == expected


def test_a_last_sample_that_is_cut_off_was_not_taken(tmp_path):
    path = samples(tmp_path, 90, 210)
    path.write_bytes(path.read_bytes()[:-9])
    assert taken(read_around(path, PHASE_NS)) == [90, None]


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b"a_total 1\n")], ids=["not gzip", "no time"])
def test_samples_that_nobody_wrote_are_a_damaged_file(tmp_path, data):
    path = tmp_path / "a.samples.prom.gz"
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=r"not gzip|without its time"):
        read_around(path, PHASE_NS)


def test_what_no_sample_says_is_said_by_the_scrapes_around_the_replay(tmp_path):
    before, after = tmp_path / "a.before.prom", tmp_path / "a.after.prom"
    for path, value in ((before, 10), (after, 500)):
        path.write_text(f"# TYPE lmcache_mp_lookup_hit_tokens counter\nlmcache_mp_lookup_hit_tokens_total {value}\n")

    def hits(*moments_s):
        folder = tmp_path / str(moments_s)
        around = read_around(samples(folder, *moments_s), PHASE_NS)
        return find(read_pair(before, after, "a", around).series, "store_hit_tokens").value

    assert [hits(90, 210), hits(150, 210), hits(90, 150), hits(150)] == [120, 200, 410, 490]
    assert not read_pair(None, after, "a", read_around(samples(tmp_path, 90), PHASE_NS)).whole_life
