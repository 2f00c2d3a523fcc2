"""Logs of failed attempts -> class and first cause. Cases of public reports carry their ids (V: vLLM, L: LMCache,
M: Mooncake and SGLang HiCache, P: load generators, D: InferenceX)."""

import re

import pytest

from workflow.contract import InputError
from workflow.failures import (
    MEANING,
    SIGNATURES,
    WORTH_RETRYING,
    Failure,
    FailureClass,
    classes_table,
    diagnose,
    first_cause,
    known_table,
    last_failure,
)

C = FailureClass
TRACE = """\
INFO 12-01 06:49:13 [core.py:70] loading
(EngineCore_0 pid=712) ERROR 12-01 06:49:14 [core.py:708] Traceback (most recent call last):
(EngineCore_0 pid=712) ERROR 12-01 06:49:14 [core.py:708]   File "scheduler.py", line 3, in schedule
(EngineCore_0 pid=712) ERROR 12-01 06:49:14 [core.py:708]     raise ValueError("inner")
INFO:     127.0.0.1:1234 - "GET /health HTTP/1.1" 200
(EngineCore_0 pid=712) ERROR 12-01 06:49:14 [core.py:708] ValueError: the real cause
Traceback (most recent call last):
  File "api_server.py", line 9
RuntimeError: Engine core died
"""


def logs(tmp_path, engine="", client="", **sidecars):
    for name, text in {**sidecars, "engine": engine, "client": client}.items():
        (tmp_path / f"{name}.log").write_text(text)
    return [tmp_path / f"{name}.log" for name in (*sidecars, "engine")], tmp_path / "client.log"


def test_the_first_traceback_wins_also_behind_a_prefix_and_between_other_lines():
    assert first_cause(TRACE.splitlines()) == "ValueError: the real cause"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("all good\nfinished with 0 errors\n", None),
        ("a\nRuntime error: no memory\nlater error\n", "Runtime error: no memory"),
        ("Traceback (most recent call last):\n  File x\n", None),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("", None),
        # Both from a vLLM whose sidecar had died.
        (
            "(APIServer pid=1975) WARNING 12-01 10:09:05 [system_utils.py:299] Found ulimit of 20000 and failed to "
            "automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.\n"
            "(APIServer pid=1975) INFO 12-01 10:09:57 [launcher.py:116] [shutdown] stopping engine client mode=abort\n",
            None,
        ),
    ],
)
def test_first_cause(text, cause):
    assert first_cause(text.splitlines()) == cause


def test_the_server_is_believed_before_the_client(tmp_path):
    services, client = logs(tmp_path, engine=TRACE, client="Traceback (most recent call last):\n f\nClientError: 500\n")
    assert diagnose(C.CLIENT_FAILED, services, client).first_cause == "ValueError: the real cause"


def test_a_traceback_of_the_engine_comes_before_a_mere_word_of_a_sidecar(tmp_path):
    services, client = logs(tmp_path, store="error: reconnecting\n", engine=TRACE)
    assert diagnose(C.ENGINE_DIED, services, client).first_cause == "ValueError: the real cause"


def test_the_client_is_asked_where_the_services_say_nothing(tmp_path):
    services, client = logs(tmp_path, engine="fine\n", client="fatal: no tokenizer\n")
    assert diagnose(C.CLIENT_FAILED, services, client).first_cause == "fatal: no tokenizer"


def test_unknown_faults_keep_what_the_attempt_saw(tmp_path):
    services, client = logs(tmp_path, engine="something new went wrong: error 77\n")
    seen = diagnose(C.ENGINE_DIED, services, client)
    assert (seen.failure_class, seen.known_as) == (C.ENGINE_DIED, None)
    assert seen.first_cause == "something new went wrong: error 77"


def test_a_line_that_only_informs_is_no_cause(tmp_path):
    line = "I1201 10:05:37.102624  3710 master_admin_service.cpp:301] Metrics: Evict failed=0, Batch (killed=0)\n"
    services, client = logs(tmp_path, master=line + "E1201 10:06:00.1 37 x.cpp:1] cannot bind\n", engine="fine\n")
    assert diagnose(C.SIDECAR_DIED, services, client).first_cause == "E1201 10:06:00.1 37 x.cpp:1] cannot bind"


def test_missing_logs_say_nothing(tmp_path):
    seen = diagnose(C.UNKNOWN, [tmp_path / "engine.log"], tmp_path / "client.log")
    assert (seen.failure_class, seen.first_cause) == (C.UNKNOWN, None)


@pytest.mark.parametrize("kind", [C.INTERRUPTED, C.ALREADY_RUNNING, C.VERSION_MISMATCH, C.OUTPUT_NOT_WRITTEN])
def test_what_is_known_without_logs_is_not_overruled_by_them(tmp_path, kind):
    services, client = logs(tmp_path, engine="AssertionError: popleft_n\n")
    assert diagnose(kind, services, client).failure_class == kind


CASES = {
    "V1 a killed server's file fills /dev/shm": (
        "RuntimeError: Insufficient space in /dev/shm for 300 GB",
        C.NODE_UNFIT,
    ),
    "V1 madvise": ("OSError: madvise on /dev/shm/vllm_offload_1.mmap: Bad address", C.NODE_UNFIT),
    "V2 512 GiB in one piece surfaces as CUDA out of memory": (
        "WARNING cudaHostRegister failed: invalid argument\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
        C.CONFIGURATION,
    ),
    "V4 assertion in update_state_after_alloc": (
        'Traceback (most recent call last):\n  File "c.py", line 1, in update_state_after_alloc\nAssertionError',
        C.ENGINE_BUG,
    ),
    "V5 a preempted request is admitted again while its blocks are copied": (
        'Traceback (most recent call last):\n  File "scheduler.py", line 1, in update_state_after_alloc\n'
        "    assert not req_status.transfer_jobs\nAssertionError",
        C.ENGINE_BUG,
    ),
    "L2 eviction thread of IsolatedLRU": ("Exception in thread evict: IsolatedLRU KeyError", C.ENGINE_BUG),
    "L4 chunk and block": ("ValueError: chunk size 256 must be a multiple of block size 544", C.CONFIGURATION),
    "a file tier that fills its disk, as vLLM 0.25.1 said it on the H200": (
        "(EngineCore pid=9059) ERROR 12-01 15:59:52 [thread_pool.py:169] Job 77 block I/O failed: [Errno 28] No space "
        "left on device: '/srv/sweep/results/shared/02-tiering/20261201T155741-8933/server/scratch/kv-tier/x'",
        C.SCRATCH_FULL,
    ),
    "L5 shared memory of the store": ("ERROR Insufficient /dev/shm capacity", C.NODE_UNFIT),
    "M2 the master drops a client": ("I1201 master.cpp:9 action=client_expired id=3", C.SIDECAR_DIED),
    "M10 watchdog of a scheduler that hangs": ("Scheduler watchdog timeout (self.watchdog_timeout=300)", C.STALLED),
    "M11 pin budget in a container": ("Pin budget: 0 tokens (ratio=0.000)", C.CONFIGURATION),
    "D cuMem with LMCache": ("register_kv_caches failed: cudaErrorInvalidValue", C.CONFIGURATION),
    "D pool too large for IPC": ("hipErrorInvalidDevicePointer", C.CONFIGURATION),
    "D read lease": ("finish read on non-read-locked key", C.CONFIGURATION),
    "D torch fallback": ("WARNING ops compiled extension not found", C.CONFIGURATION),
    "D rail down": ("E1201 topology.cpp:1 0 HCA found after 20 retries", C.NODE_UNFIT),
    "D eager mode": ("AssertionError: popleft_n", C.ENGINE_BUG),
    "D failed load": ("CUDA error: an illegal memory access was encountered in kv load", C.CONFIGURATION),
    "D draft model": ("Pre-permute function for flashinfer to triton is not registered", C.CONFIGURATION),
    "D out of memory while the cache fills": ("oom-kill:constraint=CONSTRAINT_MEMCG", C.OUT_OF_MEMORY),
    "D model name": ("NotFoundError: The model `x` does not exist.", C.CONFIGURATION),
    "D dataset build": ("Timed out waiting for Configure Profiling after 900 s", C.OUT_OF_TIME),
    "D whiteout": ("enroot-aufs2ovlfs: failed to remove aufs whiteout", C.IMAGE_PULL),
    "D parallel import": ("enroot: [ERROR] File already exists: /images/x.sqsh", C.IMAGE_PULL),
    "a longest request above the cache": (
        "ValueError: To serve at least one request with the model's max seq len (8192), (0.02 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.01 GiB).",
        C.CONFIGURATION,
    ),
    "a library that is missing": ("ImportError: libibverbs.so.1: cannot open shared object", C.CONFIGURATION),
    "a port that is taken": ("OSError: [Errno 98] Address already in use", C.NODE_UNFIT),
    "a GPU that is lost": ("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.", C.NODE_UNFIT),
}


@pytest.mark.parametrize("name", CASES)
def test_known_lines(tmp_path, name):
    line, expected = CASES[name]
    services, client = logs(tmp_path, engine=f"INFO loading\n{line}\n")
    seen = diagnose(C.ENGINE_DIED, services, client)
    assert seen.failure_class == expected
    assert seen.known_as


def test_V5_an_assertion_about_a_preempted_request_is_told_from_the_connectors_others(tmp_path):
    prefix = "(EngineCore pid=10329) ERROR 08-13 06:13:44 [core.py:1332] "
    traceback = (
        "Traceback (most recent call last):",
        '  File "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py", line 512, in '
        "update_state_after_alloc",
        "    assert not req_status.transfer_jobs",
        "AssertionError",
    )
    services, client = logs(tmp_path, engine="".join(f"{prefix}{line}\n" for line in traceback))
    seen = diagnose(C.ENGINE_DIED, services, client)
    assert (seen.failure_class, seen.first_cause) == (C.ENGINE_BUG, "AssertionError")
    assert seen.known_as.startswith("vLLM admitted a preempted request again")


def test_L13_a_crash_inside_of_the_connector_is_the_engines_and_its_exception_is_kept(tmp_path):
    text = (
        "(EngineCore pid=9) ERROR 08-13 06:13:44 [core.py:1332] Traceback (most recent call last):\n"
        '(EngineCore pid=9) ERROR 08-13 06:13:44 [core.py:1332]   File "lmcache_mp_connector.py", line 716, in load\n'
        "(EngineCore pid=9) ERROR 08-13 06:13:44 [core.py:1332] IndexError: list index out of range\n"
    )
    services, client = logs(tmp_path, engine=text, client="aiohttp.ClientError: Server disconnected\n")
    seen = diagnose(C.CLIENT_FAILED, services, client)
    assert seen.first_cause == "IndexError: list index out of range"


def test_a_disk_that_is_full_for_us_was_filled_by_the_tier_that_says_so_and_by_no_other_line(tmp_path):
    line, _ = CASES["a file tier that fills its disk, as vLLM 0.25.1 said it on the H200"]
    services, client = logs(tmp_path, engine=f"{line}\n")
    assert diagnose(C.OUTPUT_NOT_WRITTEN, services, client).failure_class == C.SCRATCH_FULL
    services, client = logs(tmp_path, engine="WARNING ops compiled extension not found\n")
    assert diagnose(C.OUTPUT_NOT_WRITTEN, services, client).failure_class == C.OUTPUT_NOT_WRITTEN


def test_every_signature_has_a_case():
    lines = [line for text, _ in CASES.values() for line in text.splitlines()]
    unused = [one.pattern.pattern for one in SIGNATURES if not any(one.pattern.search(line) for line in lines)]
    assert unused == []


HARMLESS = """\
INFO 12-01 06:49:13 [gpu_worker.py:1] Available KV cache memory: 50 GiB, CUDA graphs captured
INFO 12-01 06:49:13 [cpu.py:1] Allocating 300 GB in /dev/shm, chunk size 256, block size 64
INFO 12-01 06:49:13 [launcher.py:1] Route: /v1/models, Methods: GET
INFO 12-01 06:49:13 [connector.py:1] kv_load_failure_policy=recompute, IsolatedLRU is not used
srv  get_availabl: updating prompt cache
INFO Mooncake: 8 HCAs found, watchdog_timeout=300
"""


def test_ordinary_lines_match_nothing(tmp_path):
    services, client = logs(tmp_path, engine=HARMLESS)
    assert diagnose(C.ENGINE_DIED, services, client).known_as is None


def test_what_cannot_work_is_not_tried_again():
    no_use = set(FailureClass) - WORTH_RETRYING
    assert no_use == {
        C.CONFIGURATION,
        C.VERSION_MISMATCH,
        C.ENGINE_BUG,
        C.ALREADY_RUNNING,
        C.SUBMIT_REFUSED,
        C.OUTPUT_NOT_WRITTEN,
        C.SCRATCH_FULL,
    }


def record(point, attempt, unix_s, **change):
    return Failure(
        schema_version=Failure.SCHEMA_VERSION,
        point=point,
        attempt=attempt,
        failure_class=C.UNKNOWN,
        message="x",
        first_cause=None,
        worth_retrying=True,
        unix_s=unix_s,
        logs=(),
    ).model_copy(update=change)


def test_the_newest_record_of_a_point_counts(tmp_path):
    assert last_failure(tmp_path, "p-1") is None
    for point, attempt, unix_s in (("p-1", "b", 1.0), ("p-1", "a", 2.0), ("p-12", "c", 3.0)):
        record(point, attempt, unix_s).write(tmp_path / f"{point}.{attempt}.json")
    assert last_failure(tmp_path, "p-1").attempt == "a"


def test_a_record_of_another_version_is_refused_by_name(tmp_path):
    path = tmp_path / "p.a.json"
    path.write_text(record("p", "a", 1.0).to_json().replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(InputError, match="newer or unknown version 9"):
        last_failure(tmp_path, "p")


def test_the_tables_in_the_docs_are_current(project):
    text = (project / "docs/failures.md").read_text()
    assert classes_table() in text
    assert known_table() in text
    assert set(MEANING) == set(FailureClass)


def test_the_docs_list_every_injected_fault_and_no_other(project):
    listed = re.findall(r"\| `(test_\w+)` \|$", (project / "docs/failures.md").read_text(), re.MULTILINE)
    written = [
        name
        for path in sorted((project / "tests/faults").glob("test_*.py"))
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    assert sorted(set(listed)) == sorted(set(written))
