"""Figures count what moved and what was waited for, by kind, per step and in total."""

import threading
import time
from dataclasses import asdict

import pytest

import offload
from offload.swap.stats import KINDS, METER, Meter


def test_a_new_meter_has_moved_nothing():
    snapshot = Meter().snapshot()
    assert snapshot["last_step"] is None
    assert snapshot["steps"] == 0
    assert snapshot["bytes_read"] == snapshot["bytes_written"] == dict.fromkeys(KINDS, 0)


def test_a_step_records_what_came_since_the_step_before():
    meter = Meter()
    meter.read("parameters", 10)
    meter.written("optimizer", 20)
    first = meter.finish_step()
    meter.read("parameters", 1)
    second = meter.finish_step()
    assert (first.step, first.bytes_read["parameters"], first.bytes_written["optimizer"]) == (1, 10, 20)
    assert (second.step, second.bytes_read["parameters"], second.bytes_written["optimizer"]) == (2, 1, 0)
    assert meter.snapshot()["bytes_read"]["parameters"] == 11
    assert meter.snapshot()["last_step"] == second


def test_a_record_has_memory_and_time():
    meter = Meter()
    time.sleep(0.01)
    record = asdict(meter.finish_step())
    assert record["seconds"] >= 0.01
    assert record["resident_bytes"] > 1 << 20
    assert record["locked_bytes"] >= 0


def test_stalls_are_timed_also_when_the_wait_fails():
    meter = Meter()
    with pytest.raises(OSError, match="x"), meter.stall("gradients"):
        time.sleep(0.01)
        raise OSError("x")
    assert meter.finish_step().seconds_stalled["gradients"] >= 0.01
    assert meter.finish_step().seconds_stalled["gradients"] == 0


def test_tensors_kept_in_memory_are_counted_up_and_down():
    meter = Meter()
    meter.keep_in_memory("parameters", 100)
    meter.keep_in_memory("parameters", -40)
    assert meter.snapshot()["kept_in_memory_bytes"] == {"parameters": 60}


def test_threads_lose_no_count():
    meter = Meter()
    threads = [
        threading.Thread(target=lambda: [meter.read("optimizer", 1) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.snapshot()["bytes_read"]["optimizer"] == 8000


def test_a_snapshot_does_not_change_afterwards():
    meter = Meter()
    before = meter.snapshot()
    meter.read("parameters", 1)
    meter.keep_in_memory("parameters", 1)
    assert before["bytes_read"]["parameters"] == 0
    assert before["kept_in_memory_bytes"] == {}


def test_the_package_reports_the_meter_of_the_process():
    assert offload.stats()["bytes_read"] == METER.snapshot()["bytes_read"]
