"""What a gate has in hand: the engine, fresh checkpoints, the candidate and the oracle in turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from metainfer_lab import checkpoints
from metainfer_lab.checkpoints import fullsize, seeded
from metainfer_lab.checkpoints.planted import Planted
from metainfer_lab.checkpoints.planted_dense import planted_dense
from metainfer_lab.checkpoints.planted_qwen36 import planted_qwen36
from metainfer_lab.checkpoints.tiny import draw_dims, tiny_checkpoint
from metainfer_lab.checkpoints.tiny_qwen36 import shallow_config, tiny_qwen36
from metainfer_lab.engine import (
    EngineError,
    EngineManifest,
    EngineProcess,
    Nursery,
    StepResult,
    is_recorded,
)
from metainfer_lab.errors import InputError
from metainfer_lab.gates.compare import (
    Ask,
    Text,
    Truth,
    calibrated_truth,
    calibrated_truths,
    fixed_truth,
    text_with,
)
from metainfer_lab.gates.tolerances import CALIBRATED, Depth
from metainfer_lab.gates.verdict import Findings
from metainfer_lab.model import ModelDims
from metainfer_lab.oracle import Dtype, Oracle
from metainfer_lab.paths import MODELS
from metainfer_lab.sandbox import Sandbox, choose
from metainfer_lab.spec import Spec

SMALL_BYTES = 32 << 20


@dataclass
class Trial:
    """One verification of one engine. Each gate gets its own `rng` and `findings`; kernels: where
    candidates keep those that they compile, beside other verifications of the same engine.

    The oracle answers only while no candidate lives: what is right comes into being after the
    candidate's outputs are in the parent's hands.
    """

    folder: Path
    spec: Spec
    device: str
    sandbox: Sandbox
    work: Path
    kernels: Path | None = None
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    findings: Findings = field(default_factory=Findings)
    level: str = "none"
    sockets: bool = False
    _living: int = 0
    _open: ExitStack = field(default_factory=ExitStack)
    _oracle: Oracle | None = None
    _made: int = 0
    _dequantised: dict[Path, Path] = field(default_factory=dict)

    @cached_property
    def manifest(self) -> EngineManifest:
        try:
            return EngineManifest.read(self.folder)
        except InputError as error:  # of the engine's making, so the engine's failure
            raise EngineError("engine.json", str(error)) from None

    @cached_property
    def dims(self) -> ModelDims:
        return ModelDims.load(self.spec.model)

    @property
    def activations(self) -> str:
        """The number format that decides tolerances. Naive operators compute in float32."""
        asked = self.spec.precision.activations
        return "fp32" if self.device == "cpu" and asked == "bf16" else asked

    @property
    def exact_text(self) -> bool:
        """Whether equal requests in other company may be asked for equal tokens."""
        return self.activations == "fp32"

    @property
    def heads(self) -> tuple[bool, ...]:
        """Whether the head is tied to the embedding: the ways that an engine must read."""
        return (False,) if self.dims.moe else (True, False)

    def tiny(self, *, num_hidden_layers: int = 3, shards: int = 1, **fixed: Any) -> Path:
        """A fresh tiny checkpoint of the spec's family, dims drawn within the engine's granules.

        fixed: fields of config.json. Of the hybrid's layers the last one is attention, and with
        two layers or more both kinds are there.
        """
        seed, folder = int(self.rng.integers(2**62)), self.new_folder()
        if self.dims.family == "qwen3_5_moe":
            linear = ["linear_attention"] * (num_hidden_layers - 1)
            kinds = {"layer_types": [*linear, "full_attention"]}
            if self.full_width:
                return self._wide(seed, folder, **kinds | fixed)
            return tiny_qwen36(seed, folder, shards=shards, **self._hybrid(), **kinds | fixed)
        fixed["num_hidden_layers"] = num_hidden_layers
        dims = draw_dims(self.rng, self.dims, self.manifest.granules, **fixed)
        return tiny_checkpoint(
            self.dims.family, seed, folder, shards=shards, dtype=self._dtype, **dims
        )

    @property
    def full_width(self) -> bool:
        """Whether small checkpoints must be as wide as the model: kernels may serve no other."""
        return self.device == "cuda" and self.manifest.full_width

    def _wide(self, seed: int, folder: Path, layer_types: list[str], **fixed: Any) -> Path:
        """As wide as the model, a few layers and a small vocabulary; drawn on the GPU."""
        config = json.loads((MODELS / self.spec.model / "config.json").read_text())
        small = {"vocab_size": 64 * int(self.rng.integers(4, 9)), "bos_token_id": 0}
        config["text_config"] |= small | {"eos_token_id": 1} | fixed
        few = shallow_config(config, layer_types)
        return fullsize.write(few, seed, folder, self.device, text_only=True)

    def shallow(self) -> Path:
        """A fresh checkpoint of the model's full width, a layer of each kind; some gigabytes."""
        config = json.loads((MODELS / self.spec.model / "config.json").read_text())
        kinds = sorted(set(self.dims.layer_types), reverse=True)  # attention last
        seed, folder = int(self.rng.integers(2**62)), self.new_folder()
        few = shallow_config(config, kinds)
        return fullsize.write(few, seed, folder, self.device, text_only=True)

    def planted(self) -> Planted:
        """A fresh checkpoint whose greedy text is known to the letter, in any precision."""
        seed, folder = int(self.rng.integers(2**62)), self.new_folder()
        granules = self.manifest.granules
        if self.dims.family == "qwen3_5_moe":
            return planted_qwen36(seed, folder, **self._hybrid())
        return planted_dense(seed, folder, self.dims, dtype=self._dtype, granules=granules)

    @property
    def _dtype(self) -> str:
        return "bfloat16" if self.activations == "bf16" else "float32"

    def _hybrid(self) -> dict[str, Any]:
        """How the hybrid's checkpoints are laid out: as the spec's own is."""
        layout = {"granules": self.manifest.granules, "wrapped": self.dims.wrapped}
        if self.spec.precision.weights != "nvfp4-mix":
            return layout
        return layout | {"quantised": True, "oracle": self._oracles()}

    def real(self) -> Path | None:
        """The spec's own checkpoint, where its weights can be had without a model hub; one of full
        size that is drawn from a seed where there is a GPU to draw it and to answer for it."""
        return self._real

    @cached_property
    def _real(self) -> Path | None:
        """A small one as a copy, so that it is handled like those made here."""
        source = self.spec.checkpoint.source
        drawn = source == seeded.FULL_SIZE and self.device == "cuda"
        if not (drawn or source in checkpoints.KNOWN or Path(source).expanduser().is_dir()):
            return None
        found = checkpoints.fetch(self.spec)
        if _bytes(found) > SMALL_BYTES:
            return found
        return shutil.copytree(found, self.new_folder())

    def new_folder(self) -> Path:
        """A path below the work folder that does not exist yet."""
        self._made += 1
        return self.work / f"{self._made:03d}"

    def prompt(self, length: int, vocab_size: int) -> list[int]:
        """Token ids drawn on the spot."""
        return self.rng.integers(0, vocab_size, length).tolist()

    @contextmanager
    def candidate(
        self, checkpoint: Path | None, *, folder: Path | None = None, **settings: Any
    ) -> Iterator[EngineProcess]:
        """The engine in its own process; every checkpoint made so far is readable there.

        folder: a copy of the engine to run in place of it.
        """
        tiny = self._is_tiny(checkpoint)
        process = EngineProcess(
            folder or self.folder,
            checkpoint,
            device=self.device,
            sandbox=self.sandbox,
            readable=[self.work],
            threads=1 if tiny else None,
            nursery=self._nursery if tiny and self.device == "cpu" else None,
            compiled=self._compiled if self.device == "cuda" else None,
            **settings,
        )
        self.level = process.level
        self.sockets |= process.sockets
        self._living += 1
        try:
            with process:
                yield process
        finally:
            self._living -= 1

    @cached_property
    def _compiled(self) -> Path:
        """Kernels that one candidate compiled are there for the next one, and for nobody else."""
        folder = self.kernels or self.new_folder()
        folder.mkdir(exist_ok=True)
        return folder

    @cached_property
    def _nursery(self) -> Nursery:
        """Where tiny candidates start; a GPU's driver wants a process of its own each time."""
        level = choose(self.sandbox, trusted=is_recorded(self.folder))
        return self._open.enter_context(Nursery(level, [self.folder, self.work], threads=1))

    def oracle(self, checkpoint: Path, dtype: Dtype = "float64") -> Oracle:
        """The oracle, turned to a checkpoint, or to its exactly dequantised form.

        A large checkpoint goes through a GPU layer by layer, where there is one.
        """
        if self.device == "cuda" and _bytes(checkpoint) > SMALL_BYTES:
            assert not self._living, "the oracle speaks after the candidate has ended"
            oracle, computed = self._streamed, checkpoint
        else:
            oracle, computed = self._oracles(), self._as_computed(checkpoint)
        oracle.use(computed, dtype)
        return oracle

    def warm(self) -> None:
        """Let the oracle's processes start beside what comes first."""
        self._oracles()
        if self.device == "cuda":
            _ = self._streamed

    def _oracles(self) -> Oracle:
        assert not self._living, "the oracle speaks after the candidate has ended"
        if self._oracle is None:
            self._oracle = self._open.enter_context(Oracle())
        return self._oracle

    @cached_property
    def _streamed(self) -> Oracle:
        return self._open.enter_context(Oracle(device=self.device, streamed=True))

    def ask(
        self,
        checkpoint: Path,
        depth: Depth = "tiny",
        answers: Sequence[tuple[Sequence[int], Sequence[StepResult]]] = (),
    ) -> Ask:
        """The oracle turned to a checkpoint, as a function of tokens and positions.

        answers: prompts, and what the engine said to them, that will be asked about; where passes
        are long, on a GPU, they share them.
        """
        per_token = self.dims.moe and ModelDims.from_config(checkpoint).moe.num_experts_per_tok
        if self.activations in CALIBRATED:
            # beside the cost of 8 bits, float32 is exact; at full size float64 takes minutes
            oracle = self.oracle(checkpoint, "float64" if depth == "tiny" else "float32")
            given = (oracle, CALIBRATED[self.activations], per_token)
            texts = [text_with(*answer) for answer in answers if answer[1]]
            if self.device == "cuda" and texts:
                return _known(texts, calibrated_truths(*given, texts))
            return partial(calibrated_truth, *given)
        return partial(fixed_truth, self.oracle(checkpoint), self.activations, depth, per_token)

    def end(self) -> None:
        """End the nursery's process, and the oracle's if it was started here."""
        self._open.close()

    def _is_tiny(self, checkpoint: Path | None) -> bool:
        # A second thread gains nothing there, and on a busy machine each product waits for it.
        return checkpoint is None or checkpoint.is_relative_to(self.work)

    def _as_computed(self, checkpoint: Path) -> Path:
        """The checkpoint itself, or the plain one of exactly the values that it stands for."""
        if "quantization_config" in json.loads((checkpoint / "config.json").read_text()):
            from metainfer_lab.checkpoints.modelopt import dequantised_checkpoint
        elif self.spec.precision.weights == "int8":
            from metainfer_lab.checkpoints.int8 import dequantised_checkpoint
        else:
            return checkpoint
        if checkpoint not in self._dequantised:
            self._dequantised[checkpoint] = dequantised_checkpoint(checkpoint, self.new_folder())
        return self._dequantised[checkpoint]


def _known(texts: Sequence[Text], truths: Sequence[Truth]) -> Ask:
    def key(tokens: Sequence[int], positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tokens), tuple(positions)

    found = {key(*text): truth for text, truth in zip(texts, truths, strict=True)}
    return lambda tokens, positions, experts=None: found[key(tokens, positions)]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def max_context(checkpoint: Path, limit: int = 256) -> int:
    """A context that the model allows, no longer than a gate needs."""
    return min(limit, ModelDims.from_config(checkpoint).max_position_embeddings)


def describe(params: Mapping[str, Any]) -> str:
    """Sampling parameters in one line, for a failure's detail; a long bias by its length."""

    def brief(value: Any) -> str:
        return f"of {len(value)} ids" if isinstance(value, dict) and len(value) > 3 else f"{value}"

    return ", ".join(f"{name}={brief(value)}" for name, value in params.items()) or "defaults"


def refused(
    findings: Findings,
    case: str,
    name: str,
    call: Callable[[], Any],
    scattered: Callable[[str], bool] = lambda text: False,
) -> None:
    """A call must raise a ValueError that names `name`; scattered: whether its text blames so many
    that it has found none."""
    findings.case()
    try:
        call()
    except EngineError as error:
        if error.type != "ValueError" or name not in error.text or scattered(error.text):
            wanted = f"wanted a ValueError that names {name}"
            wanted += " and few others" if name in error.text else ""
            findings.fail(case, f"{wanted}, got {error.type}: {error.text[:200]}")
        return
    findings.fail(case, f"{name}: accepted without an error; wanted a ValueError that names it")
