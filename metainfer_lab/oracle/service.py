"""The oracle's process: it answers what `Oracle` asks over a pipe."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from metainfer_lab import wire
from metainfer_lab.oracle import Dtype, Rounding
from metainfer_lab.oracle.rounding import ROUND, is_wide

SMALL = 10_000_000  # parameters: below it a second thread costs more than it gains
# The eager experts are the only ones that compute in float64; dense models ignore them.
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


class Service:
    """What the oracle's process does."""

    model: Any = None

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.threads = torch.get_num_threads()

    def use(self, checkpoint: str, dtype: Dtype) -> dict[str, Any]:
        """Load a checkpoint; errors of transformers become the answer."""
        self.model = self.load(checkpoint, getattr(torch, dtype))
        small = self.model.num_parameters() < SMALL
        torch.set_num_threads(1 if small else self.threads)
        self.model.eval().model.rotary_emb.forward = exact_rotary(self.model.config)
        for module in self.model.modules():
            if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
                module.forward = unwatched(module.forward)
        return {}

    def load(self, checkpoint: str, dtype: torch.dtype) -> Any:
        """The model on the device."""
        from transformers import AutoModelForCausalLM

        made = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **PLAIN)
        return made.to(self.device)

    def logits(
        self,
        tokens: list[list[int]],
        positions: list[list[int]],
        rounding: Rounding | None = None,
        experts: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """One forward pass over some texts; the head for the asked positions alone.

        experts [layers, texts * longest, k]. Logits of one text after another [rows, V]; router
        [layers, texts, longest, E].
        """
        with torch.no_grad(), self._rounding(rounding), self._routing(experts) as router:
            rows = self._forward(tokens, positions)
        made = {"logits": rows.cpu().numpy()}
        if router:
            made["router"] = torch.stack(router).unflatten(1, (len(tokens), -1)).cpu().numpy()
        return made

    def _forward(self, tokens: list[list[int]], positions: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, tokens))  # what is filled up comes behind, where nothing looks
        filled = [text + [0] * (longest - len(text)) for text in tokens]
        with keep_float64() if self.model.dtype == torch.float64 else nullcontext():
            output = self.model.model(torch.tensor(filled, device=self.device), use_cache=False)
            hidden = output.last_hidden_state
            asked = torch.cat([hidden[text, at] for text, at in enumerate(positions)])
            return self.model.lm_head(asked)

    def sensitivity(self, tokens: list[int]) -> dict[str, Any]:
        """A backward pass from all positions together."""
        rows = self._forward([tokens], [list(range(len(tokens)))])
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
        seen: list[torch.Tensor] = []

        def after(_: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> Any:
            seen.append(output[0])
            if experts is None:
                return None
            chosen = torch.from_numpy(experts[len(seen) - 1]).to(self.device)
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

        def before(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(ROUND[rounding](x) if is_wide(x) else x for x in args)

        def after(_: Any, args: tuple[Any, ...], out: Any) -> Any:
            return ROUND[rounding](out) if is_wide(out) else out

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
        amax: dict[str, float] = {}

        def see(module: str, x: torch.Tensor) -> None:
            amax[module] = max(amax.get(module, 0.0), x.abs().max().item() if x.numel() else 0.0)

        hooks = [
            module.register_forward_pre_hook(input_hook(name, module, see))
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) or hasattr(module, "gate_up_proj")
        ]
        for prompt in prompts:
            self.logits([prompt], [[0]])
        for hook in hooks:
            hook.remove()
        return {"amax": amax}


def keep_float64() -> Any:
    """A context in which a float64 tensor that is asked for as float32 stays as it is."""

    class KeepFloat64(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = kwargs or {}
            if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.promote_types(args[0].dtype, torch.float32)}
            return func(*args, **kwargs)

    return KeepFloat64()


def unwatched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Outside keep_float64, which costs more than small experts do; they narrow nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return forward(*args, **kwargs)

    return call


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


def exact_rotary(config: Any) -> Any:
    """cos and sin [1, T, D] of position · theta^(-2i/D), angles in float64 whatever the model's.

    D: the leading dimensions of a head that rotate; multimodal positions are [axes, 1, T].
    """
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_parameters {rope}: only plain RoPE is known here")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    frequencies = rope["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The axes of multimodal positions are all alike for text.
        positions = position_ids[0] if position_ids.ndim == 3 else position_ids
        angles = positions[..., None].double() * frequencies.to(positions.device)
        both = torch.cat([angles, angles], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    return forward


def serve(commands: int, results: int, device: str, streamed: bool) -> None:
    """Answer until the parent is gone."""
    if streamed:
        from metainfer_lab.oracle.streamed import StreamedService as kind
    else:
        kind = Service
    service = kind(device)
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
    # Plain torch alone: no kernel that happens to be installed takes part.
    sys.modules |= dict.fromkeys(("fla", "causal_conv1d"))
    torch.backends.cudnn.allow_tf32 = False
    importlib.import_module("transformers.modeling_utils")  # seconds, while nobody waits yet
    serve(**json.loads(sys.argv[1]))
