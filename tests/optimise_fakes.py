"""A machine of a test's own: engines whose speed, gates and deaths follow from words in a file."""

from __future__ import annotations

import json
import math
import random
from contextlib import contextmanager

from agent_fakes import SPEC, GateVerdict, Verdict

from metainfer_lab.agent.tools import EDITOR, Judge
from metainfer_lab.bench.workload import Workload
from metainfer_lab.optimise.bench import Broken
from metainfer_lab.optimise.records import METRICS, Block, Profile, Settings, Target
from metainfer_lab.optimise.trial import Events
from metainfer_lab.paths import tree_hash, write_atomic

# word in an engine's file -> what it does to the decode rate
GAINS = {"half": 1.005, "two": 1.02, "twenty": 1.2, "zero": 1.0, "fake": 1.3, "greedy": 1.1}
GATES = ("alone", "logits", "decode")
POINT = Workload(prompt_len=4, output_len=4)
WORKLOADS = {"main": POINT, "long": Workload(prompt_len=16, output_len=4)}


def settings(**changed) -> Settings:
    return Settings(**{"workloads": WORKLOADS} | changed)


def words(folder) -> list[str]:
    return (folder / "model.py").read_text().split()


class Machine:
    """Implements `Bench`: heavy tails (Student, three degrees), a drift, bursts of other work."""

    def __init__(self, seed: int, quiet: bool = False) -> None:
        self.rng, self.level, self.quiet = random.Random(seed), 0.0, quiet

    def smoke(self, folder):
        if "crash" in words(folder):
            raise Broken("crash", "the engine's process ended; its last words: ``` keep me ```")
        if "hang" in words(folder):
            raise Broken("timeout", "the engine's process gave no answer in 120 s")

    @contextmanager
    def pairs(self, parent, candidate, name, workload):
        sides = [self.speeds(words(folder), name) for folder in (parent, candidate)]

        def block():
            runs = [[], []]
            for index in (0, 1, 1, 0):
                slow = self.slow()
                runs[index].append({m: self.value(m, sides[index][m], slow) for m in METRICS})
            pairs = [{m: tuple(run[m] for run in side) for m in METRICS} for side in runs]
            return Block(workload=name, parent=pairs[0], candidate=pairs[1], same_tokens=1.0)

        yield block

    def speeds(self, said, name):
        gain = math.prod(GAINS.get(word, 1.0) for word in said)
        first = 0.8 if "greedy" in said else 1.0  # faster decoding, bought with the first token
        return {"decode_tok_s": gain, "ttft_ms": first, "output_tok_s": gain}

    def value(self, metric, speed, slow):
        return 50 / (speed * slow) if metric.endswith("_ms") else 50 * speed * slow

    def slow(self):
        if self.quiet:
            return 1.0
        self.level = 0.99 * self.level + self.rng.gauss(0, 0.003)
        heavy = self.rng.gauss(0, 1) / math.sqrt(self.rng.gammavariate(1.5, 2 / 3))
        burst = self.rng.uniform(0.1, 0.4) if self.rng.random() < 0.03 else 0.0
        return math.exp(self.level + 0.01 * heavy - burst)

    def profile(self, folder):
        return Profile(step_us=20.0, floor_us=5.0, targets=[Target(name="all", us=15.0, calls=1)])

    def floor(self):
        return 500.0

    def copied(self, folder):
        return "model.py:1 repeats 8 lines of a book" if "copied" in words(folder) else ""


class Memory(Events):
    """Events of a trial that nobody will resume."""

    def __init__(self):
        self.path, self.recorded, self.place, self.known = None, False, 0, []

    def _append(self, found):
        self.known.append(found)


def judged(folder, gates, on_gate):
    """A fake passes what is cheap to ask and fails what only a keeper is asked."""
    good = not ("fake" in words(folder) and "decode" in gates) and "wrong" not in words(folder)
    found = [
        GateVerdict(gate=gate, status="pass" if good else "fail", passed=good) for gate in gates
    ]
    return Verdict(engine="engine", tree=tree_hash(folder), gates=found, passed=good)


def judge() -> Judge:
    return Judge(GATES, judged)


def lay_out(folder, text="import torch\n"):
    """An engine's folder as far as the loop looks at one."""
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(text)
    precision = {"weights": "fp32", "activations": "fp32", "kv_cache": "fp32"}
    manifest = {"interface": 1, "specs": [SPEC], "run": f"{SPEC}-r1", "precision": precision}
    (folder / "engine.json").write_text(json.dumps(manifest))
    return folder


def call(name, **given):
    return {"type": "tool_use", "name": name, "input": given}


def propose(hypothesis, ratio=1.1, **more):
    return call("propose", hypothesis=hypothesis, predicted_ratio=ratio, **more)


def reply(desk, number, *blocks):
    write_atomic(desk / f"reply-{number:04d}.json", json.dumps(blocks))


def add(word, line=1):
    """An edit that holds on whatever tree an attempt begins with."""
    text = {"insert_line": line, "insert_text": f"# {word}"}
    return call(EDITOR, command="insert", path="model.py", **text)


def answers(desk, *said):
    """All replies of a run, there before they are asked for: one word an attempt."""
    for number, word in enumerate(said, 1):
        reply(desk, number, add(word), propose(f"add the word {word} to the model"))
    return desk
