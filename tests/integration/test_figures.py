"""Every step leaves a record: in `offload.stats()` and in DeepSpeed's monitor."""

import csv

import offload
from tests.integration.training import Case, advance, engine_for

CASE = Case("nvme", "nvme")


def test_a_step_is_recorded_with_what_it_moved_and_waited_for(swap_dir):
    with engine_for(CASE, swap_dir) as engine:
        advance(engine, CASE, range(2))
        record = offload.stats()["last_step"]
        swapped = sum(p.ds_numel for p in engine.module.parameters() if p.ds_numel * 2 >= 1 << 20)
    assert record.bytes_written["parameters"] == 2 * swapped
    assert record.bytes_read["parameters"] >= 2 * swapped
    assert record.bytes_written["optimizer"] >= 12 * swapped
    assert record.bytes_read["gradients"] == record.bytes_written["gradients"] == 0
    assert all(seconds >= 0 for seconds in record.seconds_stalled.values())
    assert record.seconds > 0
    assert record.resident_bytes > 1 << 20


def test_deepspeeds_monitor_gets_the_figures_of_each_step(swap_dir, tmp_path):
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    with engine_for(CASE, swap_dir, csv_monitor=monitor) as engine:
        advance(engine, CASE, range(3))
    (file,) = tmp_path.rglob("*bytes_written_optimizer*.csv")
    rows = list(csv.reader(file.open()))[1:]
    assert len(rows) == 3
    assert all(float(value) > 0 for _, value in rows)
    assert list(tmp_path.rglob("*seconds_stalled_parameters*.csv"))


def test_tensors_kept_in_memory_are_counted_while_the_engine_lives(swap_dir):
    def kept():
        return offload.stats()["kept_in_memory_bytes"].get("parameters", 0)

    before = kept()
    with engine_for(CASE, swap_dir) as engine:
        small = sum(2 * p.ds_numel for p in engine.module.parameters() if p.ds_numel * 2 < 1 << 20)
        assert kept() - before == small > 0
    assert kept() == before
