"""The oracle: transformers' own model class on a checkpoint, in a process of its own.

    with Oracle(checkpoint, dtype="float64") as oracle:
        logits = oracle.logits(tokens, positions)

It never sees the candidate, and its process is the only one that imports transformers. float64 is
float64 throughout: norms, routers, the delta rule and rotary angles too, where transformers itself
narrows to float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from metainfer_lab import wire
from metainfer_lab.errors import InputError

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "float64"]
Rounding = Literal["symmetric", "asymmetric", "bfloat16"]
TIMEOUT_S = 600.0
SMALL = 10_000_000  # parameters: below it a second thread costs more than it gains


class Routed(NamedTuple):
    """logits [positions, V]; router: the logits of all experts [layers, T, E], None where there
    are none."""

    logits: np.ndarray
    router: np.ndarray | None


class Oracle:
    """A context manager; `use` moves it to another checkpoint without a new process."""

    def __init__(self, checkpoint: Path | str | None = None, dtype: Dtype = "float64"):
        self.checkpoint = checkpoint
        self.dtype = dtype
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Oracle:
        child_in, self._commands = os.pipe()
        self._results, child_out = os.pipe()
        argv = [sys.executable, "-m", "metainfer_lab.oracle", json.dumps([child_in, child_out])]
        root = str(Path(__file__).resolve().parent.parent)
        self._process = subprocess.Popen(
            argv,
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"},
        )
        os.close(child_in)
        os.close(child_out)
        if self.checkpoint is not None:
            self.use(self.checkpoint)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.close(self._commands)
            os.close(self._results)
            process.kill()
            process.wait()

    def use(self, checkpoint: Path | str, dtype: Dtype | None = None) -> None:
        """Answer for this checkpoint from now on."""
        self.checkpoint, self.dtype = checkpoint, dtype or self.dtype
        self._call(op="use", checkpoint=str(checkpoint), dtype=self.dtype)

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], rounding: Rounding | None = None
    ) -> np.ndarray:
        """Logits [len(positions), V] in the oracle's dtype, after tokens[0 .. position].

        rounding: to see what a number format costs. symmetric, asymmetric: the input of every
        matrix product is rounded to 8 bits, one scale per token; bfloat16: what enters and leaves
        every module is rounded.
        """
        return self.routed(tokens, positions, None, rounding).logits

    def routed(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        experts: np.ndarray | None = None,
        rounding: Rounding | None = None,
    ) -> Routed:
        """`logits`, and what the routers said on the way.

        experts [layers, T, k]: those that each token goes through, in place of the routers' own
        choice; their weights are the routers' (a softmax over the chosen ones).
        """
        asked = {"tokens": [int(t) for t in tokens], "positions": [int(p) for p in positions]}
        forced = {} if experts is None else {"experts": experts}
        answer = self._call(op="logits", rounding=rounding, **asked, **forced)
        return Routed(answer["logits"], answer.get("router"))

    def sensitivity(self, tokens: Sequence[int]) -> dict[str, float]:
        """Parameter (an expert's by "name.expert") -> how far changing it moves the logits.

        In units of the logits' size, to first order, for a change of each weight by ± half of it
        at random: by one backward pass from a random direction of all positions' logits.
        """
        return self._call(op="sensitivity", tokens=[int(t) for t in tokens])["moves"]

    def input_amax(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Module -> largest |input| of each linear module, experts apart, over some prompts."""
        return self._call(op="input_amax", prompts=[list(map(int, p)) for p in prompts])["amax"]

    def _call(self, **message: Any) -> dict[str, Any]:
        try:
            wire.send(self._commands, message)
            answer = wire.receive(self._results, time.monotonic() + TIMEOUT_S)
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            raise RuntimeError(f"oracle: its process ended or hung on {message['op']}") from error
        if "error" in answer:
            raise InputError(f"oracle: {self.checkpoint}: {answer['error']}")
        return answer


class Service:
    """What the oracle's process does."""

    model: Any = None

    def __init__(self) -> None:
        import torch

        self.threads = torch.get_num_threads()

    def use(self, checkpoint: str, dtype: Dtype) -> dict[str, Any]:
        """Load a checkpoint; errors of transformers become the answer."""
        import torch
        from transformers import AutoModelForCausalLM

        # The eager experts are the only ones that compute in float64; dense models ignore them.
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        small = self.model.num_parameters() < SMALL
        torch.set_num_threads(1 if small else self.threads)
        self.model.eval().model.rotary_emb.forward = exact_rotary(self.model.config)
        return {}

    def logits(
        self,
        tokens: list[int],
        positions: list[int],
        rounding: Rounding | None = None,
        experts: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """One forward pass over the tokens; the head for the asked positions alone."""
        import torch

        with torch.no_grad(), self._rounding(rounding), self._routing(experts) as router:
            rows = self._forward(tokens, positions)
        routed = {"router": torch.stack(router).numpy()} if router else {}
        return {"logits": rows.numpy()} | routed

    def _forward(self, tokens: list[int], positions: list[int]) -> torch.Tensor:
        import torch

        with keep_float64() if self.model.dtype == torch.float64 else nullcontext():
            output = self.model.model(torch.tensor([tokens]), use_cache=False)
            return self.model.lm_head(output.last_hidden_state[0, positions])

    def sensitivity(self, tokens: list[int]) -> dict[str, Any]:
        """A backward pass from all positions together."""
        import torch

        rows = self._forward(tokens, list(range(len(tokens))))
        self.model.zero_grad()
        (rows * torch.randn_like(rows)).sum().backward()
        moves = {}
        for name, weight in self.model.named_parameters():
            change = (weight.grad * weight).detach() / 12**0.5  # of a uniform factor 1/2 .. 3/2
            parts = change.unbind() if "experts." in name else [change]
            for index, part in enumerate(parts):
                key = f"{name}.{index}" if "experts." in name else name
                moves[key] = (part.norm() / rows.detach().norm()).item()
        return {"moves": moves}

    @contextmanager
    def _routing(self, experts: np.ndarray | None) -> Iterator[list[torch.Tensor]]:
        """Collect the routers' logits, layer by layer, and put given experts in place of theirs."""
        import torch

        seen: list[torch.Tensor] = []

        def after(_: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> Any:
            seen.append(output[0])
            if experts is None:
                return None
            chosen = torch.from_numpy(experts[len(seen) - 1])
            weights = output[0].gather(1, chosen).softmax(dim=-1)
            return output[0], weights, chosen

        routers = [m for m in self.model.modules() if type(m).__name__.endswith("Router")]
        hooks = [module.register_forward_hook(after) for module in routers]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _rounding(self, rounding: Rounding | None) -> Iterator[None]:
        """Round what passes between modules, as long as the context lasts."""
        import torch

        def before(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(ROUND[rounding](x) if _is_wide(x) else x for x in args)

        def after(_: Any, args: tuple[Any, ...], out: Any) -> Any:
            return ROUND[rounding](out) if _is_wide(out) else out

        kinds = torch.nn.Module if rounding == "bfloat16" else torch.nn.Linear
        leaves = [m for m in self.model.modules() if isinstance(m, kinds) and not [*m.children()]]
        hooks = [m.register_forward_pre_hook(before) for m in leaves] if rounding else []
        if rounding == "bfloat16":
            hooks += [m.register_forward_hook(after) for m in leaves]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def input_amax(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Forward passes with a look at what enters each linear module."""
        import torch

        amax: dict[str, float] = {}

        def see(module: str, x: torch.Tensor) -> None:
            amax[module] = max(amax.get(module, 0.0), x.abs().max().item() if x.numel() else 0.0)

        hooks = [
            module.register_forward_pre_hook(input_hook(name, module, see))
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) or hasattr(module, "gate_up_proj")
        ]
        for prompt in prompts:
            self.logits(prompt, [0])
        for hook in hooks:
            hook.remove()
        return {"amax": amax}


def keep_float64() -> Any:
    """A context in which a float64 tensor that is asked for as float32 stays as it is."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class KeepFloat64(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = kwargs or {}
            if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.promote_types(args[0].dtype, torch.float32)}
            return func(*args, **kwargs)

    return KeepFloat64()


def input_hook(name: str, module: Any, see: Any) -> Any:
    """A forward pre-hook that shows `see` the inputs of a linear module or of fused experts.

    An expert that no token chose is shown the inputs of all tokens.
    """

    def linear(_: Any, args: tuple[Any, ...]) -> None:
        see(name, args[0])

    def experts(_: Any, args: tuple[Any, ...]) -> None:
        hidden, chosen = args[0], args[1]
        for expert in range(module.num_experts):
            routed = hidden[(chosen == expert).any(dim=-1)]
            rows = routed if len(routed) else hidden
            gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
            for projection in ("gate_proj", "up_proj"):
                see(f"{name}.{expert}.{projection}", rows)
            see(f"{name}.{expert}.down_proj", module.act_fn(gate) * up)

    return experts if hasattr(module, "gate_up_proj") else linear


def round_symmetric(x: torch.Tensor) -> torch.Tensor:
    """x rounded to multiples of max|x| / 127 of its row."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def round_asymmetric(x: torch.Tensor) -> torch.Tensor:
    """x rounded to 256 levels from its row's least value (0 at most) to its greatest."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low).clamp(min=1e-30) / 255
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 255) - zero) * scale


def round_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bfloat16, in the dtype that it had."""
    return x.bfloat16().to(x.dtype)


ROUND = {
    "symmetric": round_symmetric,
    "asymmetric": round_asymmetric,
    "bfloat16": round_bfloat16,
}


def _is_wide(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor) and x.is_floating_point()


def exact_rotary(config: Any) -> Any:
    """cos and sin [1, T, D] of position · theta^(-2i/D), angles in float64 whatever the model's.

    D: the leading dimensions of a head that rotate; multimodal positions are [axes, 1, T].
    """
    import torch

    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_parameters {rope}: only plain RoPE is known here")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    frequencies = rope["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = (
            position_ids[0] if position_ids.ndim == 3 else position_ids
        )  # of text: all alike
        angles = positions[..., None].double() * frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    return forward


def serve(commands: int, results: int) -> None:
    """Answer until the parent is gone."""
    service = Service()
    while True:
        try:
            message = wire.receive(commands)
        except EOFError:
            return
        try:
            answer = getattr(service, message.pop("op"))(**message)
        except Exception as error:  # the parent turns it into a line for the person
            answer = {"error": f"{type(error).__name__}: {error}"}
        wire.send(results, answer)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
