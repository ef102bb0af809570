"""Run inside the sandbox: decode with the engine that `import engine` finds, print one profile."""

import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from math import prod

import engine
import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 16
MATRIX = 1 << 15  # elements from which an argument counts as weights


def start(loaded, given):
    """Fill every stream, and step until each has its first token."""
    params = {"max_new_tokens": 4 * STEPS, "temperature": 0.0, "ignore_eos": True}
    started = set()
    for _ in range(given["max_batch"]):
        prompt = [random.randrange(given["vocab_size"]) for _ in range(given["prompt_len"])]
        loaded.submit(prompt, params)
    while len(started) < given["max_batch"]:
        started |= {event[0] for event in loaded.step()}


def steps(loaded):
    """Median microseconds of STEPS decode steps."""
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        loaded.step()
        times.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(times)


def operators(found, on_gpu):
    """Operators by name and by the shape of their largest matrix: us and calls of one step."""
    total = defaultdict(lambda: [0.0, 0])
    for event in found.key_averages(group_by_input_shape=True):
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        shapes = [tuple(s) for s in event.input_shapes if len(s) == 2 and prod(s) >= MATRIX]
        largest = max(shapes, key=prod, default=None)
        total[event.key, largest][0] += us
        total[event.key, largest][1] += event.count
    rows = [
        {
            "name": name + (f" {list(shape)}" if shape else ""),
            "us": us / STEPS,
            "calls": count / STEPS,
            "matrix": prod(shape) if shape else 0,
        }
        for (name, shape), (us, count) in total.items()
        if us > 0
    ]
    return sorted(rows, key=lambda row: -row["us"])


def main():
    """Two plain rounds, then one under the profiler."""
    given = json.loads(sys.argv[1])
    device, sizes = given["device"], ("max_batch", "max_context")
    loaded = engine.load(
        os.environ["CHECKPOINT"],
        device=device,
        cache_bytes=None,
        **{name: given[name] for name in sizes},
    )
    start(loaded, given)
    steps(loaded)
    plain = steps(loaded)
    on_gpu = device == "cuda"
    kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with torch.inference_mode(), profile(activities=kinds, record_shapes=True) as found:
        profiled = steps(loaded)
        if on_gpu:
            torch.cuda.synchronize()
    rows = operators(found, on_gpu)
    print("PROFILE " + json.dumps({"step_us": plain, "profiled_us": profiled, "operators": rows}))


main()
