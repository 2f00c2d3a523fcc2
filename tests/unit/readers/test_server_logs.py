import pytest

from workflow.readers.server_logs import read_engine_log


def read(tmp_path, text):
    path = tmp_path / "engine.log"
    path.write_text(text)
    return read_engine_log(path)


def task(at, number, prompt, cached, restored=False, lookup=True):
    stamp = f"0.{at:02d}.000.000 I "
    slot = f"{stamp}slot   operator(): id  0 | task {number} | "
    lines = [f"{stamp}srv  get_availabl: updating prompt cache"] if lookup else []
    lines += [f"{stamp}srv          load:  - found better prompt with f_keep = 0.9, f_sim = 0.9"] if restored else []
    lines += [
        f"{stamp}slot launch_slot_: id  0 | task {number} | processing task, is_child = 0",
        f"{slot}new prompt, n_ctx_slot = 8192, n_keep = 0, task.n_tokens = {prompt}",
        f"{slot}cached n_tokens = {cached}, memory_seq_rm [{cached}, end)",
        f"{slot}cached n_tokens = {prompt}, memory_seq_rm [{prompt}, end)",
    ]
    return "\n".join(lines) + "\n"


CLOCK = "log clock starts at 1000.000\n"


def test_prompt_tokens_by_source_inside_the_window(tmp_path):
    text = CLOCK + task(5, 1, 500, 400) + task(11, 2, 100, 60) + task(12, 3, 200, 150, restored=True)
    text += task(13, 4, 50, 0, lookup=False) + task(40, 5, 900, 900)
    found = read(tmp_path, text).sources(1010.0, 1030.0)
    assert (found.device, found.host, found.computed, found.tasks, found.prompt) == (60, 150, 140, 3, 350)


def test_a_restore_belongs_to_the_next_task_only(tmp_path):
    text = CLOCK + task(11, 1, 200, 150, restored=True) + task(12, 2, 100, 80, lookup=False)
    found = read(tmp_path, text).sources(1000.0, 1030.0)
    assert (found.host, found.device) == (150, 80)


def test_without_the_clock_line_the_split_is_unknown(tmp_path):
    log = read(tmp_path, task(11, 2, 100, 60, restored=True))
    assert log.sources(0.0, 1e10) is None
    assert log.restored_from_host == 1


def test_a_log_that_is_not_verbose_says_nothing(tmp_path):
    log = read(tmp_path, CLOCK + "0.11.000.000 I slot launch_slot_: id  0 | task 2 | processing task, is_child = 0\n")
    assert log.sources(1000.0, 1100.0) is None


def test_a_log_clock_that_is_early_is_mended_by_the_requests(tmp_path):
    log = read(tmp_path, CLOCK + task(10, 1, 500, 400) + task(11, 2, 100, 60))
    assert log.sources(1010.2, 1030.0).tasks == 1
    assert log.sources(1010.2, 1030.0, [(1010.25, 500), (1011.1, 100)]).tasks == 2


def test_highest_fill_of_the_host_cache(tmp_path):
    line = "0.01.000.000 I srv        update:  - cache state: {} prompts, {} MiB (limits: 512.000 MiB, 16384 tokens)\n"
    log = read(tmp_path, line.format(2, "3.000") + line.format(9, "12.500") + line.format(8, "11.000"))
    assert (log.host_used_bytes, log.host_limit_bytes) == (12.5 * 2**20, 512 * 2**20)


POOL = "(EngineCore_DP{rank} pid={pid}) INFO GPU KV cache size: {tokens:,} tokens\n"


@pytest.mark.parametrize(
    ("text", "tokens", "starts"),
    [
        ("INFO GPU KV cache size: 100,000 tokens\n" * 2, 100_000, 2),
        (POOL.format(rank=0, pid=1, tokens=1000) + POOL.format(rank=1, pid=2, tokens=800), 1800, 1),
        (POOL.format(rank=0, pid=1, tokens=1000) + POOL.format(rank=0, pid=9, tokens=1200), 1200, 2),
        ("no pool\n", None, 0),
    ],
    ids=["untagged restart", "two ranks", "tagged restart", "none"],
)
def test_G5_the_pool_is_the_last_start_s(tmp_path, text, tokens, starts):
    log = read(tmp_path, text)
    assert (log.pool_tokens, log.starts) == (tokens, starts)


def test_L5_suspect_lines_are_counted_apart_from_broken_stores(tmp_path):
    log = read(tmp_path, "Session chatcmpl-1 not found, skipping touch\n" * 2 + "Insufficient /dev/shm capacity\n")
    assert log.suspect.total() == 3
    assert not log.broken


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("I1201 10:12:50.089865  3016 tcp_transport.cpp:448] TcpTransport: I/O pool started with 1 thread(s)", "TCP"),
        (
            "I1201 10:12:50.092355  3016 registered_pinned_memory.cpp:79] Store segment pinned memory is disabled, "
            "max_bytes=0",
            "not pinned",
        ),
        (
            "LMCache WARNING: lmcache.cuda_ops compiled extension not found; CudaDeviceOps stays on the torch baseline "
            "for all ops.",
            "compiled kernels",
        ),
        ("I1201 10:12:50.089865  3016 tcp_transport.cpp:448] TcpTransport: I/O pool started with 16 thread(s)", None),
        (
            "(EngineCore pid=11924) INFO 12-01 13:15:39 [worker.py:1266] Registered KV caches: num_groups=1, "
            "num_segments=32, num_blocks=12288",
            "in pieces, one a layer",
        ),
        ("[worker.py:1266] Registered KV caches: num_groups=1, num_segments=1, num_blocks=12288", None),
    ],
)
def test_M_L_lines_of_an_h200_that_say_why_a_backend_is_slow(tmp_path, line, says):
    found = list(read(tmp_path, f"{line}\n").suspect)
    assert len(found) == (0 if says is None else 1)
    assert all(says in one for one in found)


def test_bytes_that_are_no_text_do_not_stop_the_reader(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"\xff\xfe\n" + b"GPU KV cache size: 5 tokens\n")
    assert read_engine_log(path).pool_tokens == 5
