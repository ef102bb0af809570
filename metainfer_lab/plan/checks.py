"""What cannot be, and why: each check looks at one question and names the field that decides it.

A check yields findings; `refusals` runs all of them, so that a spec learns of every fault at once.
Rates refuse only beyond nominal: what the data sheet excludes, not what nobody has reached yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from metainfer_lab.errors import InputError
from metainfer_lab.model import ModelDims
from metainfer_lab.model.layout import BITS, LINEAR, NVFP4_BLOCK, SCHEMES, storage_on_disk
from metainfer_lab.plan.case import Case, Finding
from metainfer_lab.roofline import resident_bytes, sequences_that_fit

Check = Callable[[Case], Iterator[Finding]]
BASELINES = ("transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp")


def refusals(case: Case) -> list[Finding]:
    """Everything that makes the spec impossible; the sums are done only where the shapes hold."""
    found = [finding for check in SHAPE_CHECKS for finding in check(case)]
    if not found:
        found = [finding for check in SIZE_CHECKS for finding in check(case)]
    return found


def warnings(case: Case) -> list[Finding]:
    """What is possible but worth knowing before anyone writes code."""
    return [finding for check in WARNING_CHECKS for finding in check(case)]


def check_devices(case: Case) -> Iterator[Finding]:
    tp, hardware = case.spec.parallel.tp, case.hardware
    if tp > 1 and not hardware.is_gpu:
        yield Finding(field="parallel.tp", reason=f"{tp} devices, and a CPU is one", remedy="use 1")
    elif tp > max(1, hardware.n_gpu):
        reason = f"{tp} devices, and one host of {hardware.name} has {hardware.n_gpu}"
        yield Finding(field="parallel.tp", reason=reason, remedy=f"use at most {hardware.n_gpu}")


def check_divisions(case: Case) -> Iterator[Finding]:
    """Every split dimension must come out whole; KV heads may be copied, never cut."""
    tp, dims = case.spec.parallel.tp, case.dims
    for name, size in _split_dimensions(dims).items():
        if size % tp:
            yield _division(case, f"{tp} does not divide {name} ({size})")
    kv = dims.num_key_value_heads
    if kv % tp and tp % kv:
        yield _division(case, f"{tp} neither divides nor is a multiple of the {kv} KV heads")


def _split_dimensions(dims: ModelDims) -> dict[str, int]:
    sizes = {"num_attention_heads": dims.num_attention_heads, "vocab_size": dims.vocab_size}
    if dims.intermediate_size is not None:
        sizes["intermediate_size"] = dims.intermediate_size
    if dims.moe is not None:
        sizes["moe_intermediate_size"] = dims.moe.moe_intermediate_size
        sizes["shared_expert_intermediate_size"] = dims.moe.shared_expert_intermediate_size
    if dims.gdn is not None:
        sizes["linear_num_key_heads"] = dims.gdn.num_key_heads
        sizes["linear_num_value_heads"] = dims.gdn.num_value_heads
    return sizes


def _division(case: Case, reason: str) -> Finding:
    possible = [str(tp) for tp in range(1, max(2, case.hardware.n_gpu + 1)) if _divides(case, tp)]
    return Finding(field="parallel.tp", reason=reason, remedy=f"use {' or '.join(possible)}")


def _divides(case: Case, tp: int) -> bool:
    kv = case.dims.num_key_value_heads
    whole = all(size % tp == 0 for size in _split_dimensions(case.dims).values())
    return whole and (kv % tp == 0 or tp % kv == 0)


def check_blocks(case: Case) -> Iterator[Finding]:
    """An NVFP4 scale covers 16 weights of a row: no device may hold part of such a block."""
    tp, dims = case.spec.parallel.tp, case.dims
    rows = {"hidden_size": (dims.hidden_size, "the model")}
    if dims.moe is not None:
        width = dims.moe.moe_intermediate_size
        rows["moe_intermediate_size"] = (width // tp, f"a share of {tp}")
    elif dims.intermediate_size is not None:
        rows["intermediate_size"] = (dims.intermediate_size // tp, f"a share of {tp}")
    if "nvfp4" not in case.formats.values():
        return
    for name, (size, holder) in rows.items():
        if size % NVFP4_BLOCK:
            reason = f"NVFP4 scales {NVFP4_BLOCK} weights at once and {name} of {holder} is {size}"
            remedy = "use another format, or a parallel.tp whose shares are multiples of 16"
            yield Finding(field="precision.weights", reason=reason, remedy=remedy)


def check_weights(case: Case) -> Iterator[Finding]:
    scheme, dims = case.spec.precision.weights, case.dims
    field = "precision.weights"
    if scheme == "nvfp4-mix" and dims.moe is None:
        reason = f"nvfp4-mix is laid out for expert models and {dims.family} has no experts"
        yield Finding(field=field, reason=reason, remedy="use nvfp4, fp8 or bf16")
    if not case.hardware.is_gpu and {"fp8", "nvfp4"} & set(SCHEMES[scheme].values()):
        reason = f"{scheme} has no arithmetic on a CPU"
        yield Finding(field=field, reason=reason, remedy="use fp32, bf16 or int8")
    if case.hardware.is_gpu and scheme == "int8":
        reason = "int8 is the CPU's scheme (one scale a row, activations on the fly)"
        yield Finding(field=field, reason=reason, remedy="use fp8 or bf16 on a GPU")
    for role, form in storage_on_disk(dims).items():
        if case.formats[role] != form:
            reason = f"{role} would be {case.formats[role]} and config.json stores it as {form}"
            yield Finding(field=field, reason=reason, remedy="use nvfp4-mix, as it is stored")
            return


def check_modules(case: Case) -> Iterator[Finding]:
    present = {tensor.role for tensor in case.deployment.tensors}
    for role, form in case.spec.precision.modules.items():
        field = f"precision.modules.{role}"
        if role == "embedding" and case.dims.tie_word_embeddings:
            reason = "the embedding is the head's matrix in this model"
            yield Finding(field=field, reason=reason, remedy="set precision.modules.head")
        elif role not in present:
            reason = f"{case.dims.name} has no such module"
            remedy = f"use one of {', '.join(sorted(present - {'vision', 'mtp'}))}"
            yield Finding(field=field, reason=reason, remedy=remedy)
        elif role in {"small", "embedding"} and BITS[form] < 16:
            reason = f"{form} there saves nothing and loses accuracy"
            yield Finding(field=field, reason=reason, remedy="use bf16 or fp32")
        elif form == "int8" and case.hardware.is_gpu:
            reason = "int8 is the CPU's format"
            yield Finding(field=field, reason=reason, remedy="use fp8 or nvfp4")
        elif form in {"fp8", "nvfp4"} and not case.hardware.is_gpu:
            reason = f"{form} has no arithmetic on a CPU"
            yield Finding(field=field, reason=reason, remedy="use fp32, bf16 or int8")


def check_activations(case: Case) -> Iterator[Finding]:
    """Quantised activations need weights of the same type and units that multiply them."""
    activations, field = case.spec.precision.activations, "precision.activations"
    sm, name = case.hardware.sm, case.hardware.name
    needs = {"nvfp4": ("nvfp4", 100), "fp8_static": ("fp8", 89), "int8_dynamic": ("int8", 0)}
    if activations not in needs:
        return
    form, least = needs[activations]
    if form not in {case.formats[role] for role in (*LINEAR, "head")}:
        reason = f"{activations} with no {form} weights to multiply"
        yield Finding(field=field, reason=reason, remedy=f"use bf16, or weights in {form}")
    if least and sm < least:
        units = "native FP4 matrix products" if form == "nvfp4" else "FP8 matrix products"
        where = f"{name} is {case.hardware.arch}"
        reason = f"{units} need sm_{least} or later and {where}"
        remedy = f"use bf16 activations: {form} weights alone run there" if sm else "use fp32"
        yield Finding(field=field, reason=reason, remedy=remedy)


def check_cache_types(case: Case) -> Iterator[Finding]:
    precision = case.spec.precision
    if precision.kv_cache == "fp8" and case.hardware.sm < 89:
        reason = f"{case.hardware.name} does not convert FP8 in hardware"
        yield Finding(field="precision.kv_cache", reason=reason, remedy="use bf16 or fp32")
    if precision.state == "bf16":
        reason = "a recurrent state that is rounded each step drifts away from the model"
        yield Finding(field="precision.state", reason=reason, remedy="use fp32")


def check_graphs(case: Case) -> Iterator[Finding]:
    if case.spec.capabilities.cuda_graphs and not case.hardware.is_gpu:
        reason = "a CPU has no CUDA graphs"
        yield Finding(field="capabilities.cuda_graphs", reason=reason, remedy="use false")


def check_reuse(case: Case) -> Iterator[Finding]:
    """Prefix cache and state snapshots: what is kept must be enough to go on from."""
    wants, recurrent = case.spec.capabilities, case.dims.gdn is not None
    if wants.prefix_cache and not wants.paged_kv:
        reason = "prefixes are shared block by block, and the cache has no blocks"
        yield Finding(
            field="capabilities.prefix_cache", reason=reason, remedy="set paged_kv: true or drop it"
        )
    if wants.prefix_cache and recurrent and not wants.state_snapshots:
        reason = "keys and values alone do not restore a recurrent state"
        remedy = "set state_snapshots: true or drop it"
        yield Finding(field="capabilities.prefix_cache", reason=reason, remedy=remedy)
    if wants.state_snapshots and not recurrent:
        reason = f"{case.dims.family} has no recurrent state"
        yield Finding(field="capabilities.state_snapshots", reason=reason, remedy="use false")


def check_speculation(case: Case) -> Iterator[Finding]:
    wants, dims = case.spec.capabilities, case.dims
    field = "capabilities.speculative"
    if wants.speculative == "mtp" and not dims.mtp_layers:
        reason = f"{dims.name} has no MTP layer to draft with"
        yield Finding(field=field, reason=reason, remedy="use none, ngram or draft")
    if wants.speculative == "draft" and wants.draft is None:
        reason = "a draft is asked and none is named"
        yield Finding(field=field, reason=reason, remedy="name a model in capabilities.draft")
    if wants.draft is not None and wants.speculative != "draft":
        reason = f"a draft model beside speculative: {wants.speculative} would never run"
        remedy = "use speculative: draft or drop it"
        yield Finding(field="capabilities.draft", reason=reason, remedy=remedy)
    if wants.speculative != "none" and dims.gdn is not None and not wants.state_snapshots:
        reason = "a rejected token cannot be taken back out of a recurrent state"
        yield Finding(field=field, reason=reason, remedy="set state_snapshots: true or use none")


def check_draft(case: Case) -> Iterator[Finding]:
    draft = case.spec.capabilities.draft
    if draft is None:
        return
    try:
        vocabulary = ModelDims.load(draft).vocab_size
    except InputError as error:
        yield Finding(field="capabilities.draft", reason=str(error), remedy="name a known model")
        return
    if vocabulary != case.dims.vocab_size:
        reason = f"{draft} has {vocabulary} tokens and {case.dims.name} has {case.dims.vocab_size}"
        remedy = "use a draft with the same vocabulary"
        yield Finding(field="capabilities.draft", reason=reason, remedy=remedy)


def check_workload(case: Case) -> Iterator[Finding]:
    work, longest = case.spec.workload, case.dims.max_position_embeddings
    if work.max_context > longest:
        reason = f"{work.max_context} tokens, and the model was made for {longest}"
        yield Finding(field="workload.max_context", reason=reason, remedy=f"use at most {longest}")
    if work.prompt_len + work.output_len > work.max_context:
        reason = f"{work.prompt_len} + {work.output_len} tokens do not fit {work.max_context}"
        remedy = "shorten prompt_len or output_len, or raise max_context"
        yield Finding(field="workload.max_context", reason=reason, remedy=remedy)
    if work.concurrency > 1 and not case.spec.capabilities.continuous_batching:
        reason = f"{work.concurrency} requests at once need continuous batching"
        remedy = "set capabilities.continuous_batching: true or use 1"
        yield Finding(field="workload.concurrency", reason=reason, remedy=remedy)


def check_shares(case: Case) -> Iterator[Finding]:
    goals = case.spec.goals
    for name in ("fraction_of_floor", "fraction_of_products"):
        share = getattr(goals, name)
        if share is not None and share > 1:
            reason = f"{share} is more than all of it"
            yield Finding(field=f"goals.{name}", reason=reason, remedy="use at most 1")
    for baseline, ratio in goals.ratio_to.items():
        field = f"goals.ratio_to.{baseline}"
        if baseline not in BASELINES:
            remedy = f"use one of {', '.join(BASELINES)}"
            yield Finding(field=field, reason="no such baseline", remedy=remedy)
        elif ratio <= 0:
            yield Finding(field=field, reason=f"{ratio} is no ratio", remedy="use more than 0")


def check_memory(case: Case) -> Iterator[Finding]:
    """Weights alone must fit a device, then the workload's sequences beside them."""
    spec, memory = case.spec, case.hardware.memory_bytes
    mtp = spec.capabilities.speculative == "mtp"
    weights = resident_bytes(case.deployment, mtp)
    if weights > memory:
        reason = f"{weights / 1e9:,.1f} GB of weights a device and it holds {memory / 1e9:,.1f} GB"
        yield Finding(field="hardware", reason=reason, remedy=_larger(case, mtp))
        return
    fit = sequences_that_fit(case.deployment, case.hardware, spec.workload.max_context)
    if fit < spec.workload.concurrency:
        reason = (
            f"{spec.workload.concurrency} sequences of {spec.workload.max_context} tokens do not "
            f"fit beside {weights / 1e9:,.1f} GB of weights in {memory / 1e9:,.1f} GB"
        )
        remedy = f"use at most {fit}, or lower max_context" if fit else "lower max_context"
        yield Finding(field="workload.concurrency", reason=reason, remedy=remedy)


def _larger(case: Case, mtp: bool) -> str:
    for tp in range(2, case.hardware.n_gpu + 1):
        fits = resident_bytes(case.spread(tp), mtp) <= case.hardware.memory_bytes
        if _divides(case, tp) and fits:
            return f"use parallel.tp: {tp}, fewer bits a weight, or more memory"
    return "use fewer bits a weight, or more memory"


def check_goals(case: Case) -> Iterator[Finding]:
    """Goals beyond the nominal floor, unless a cache or speculation makes that floor not bind."""
    if not case.fits_cache():
        yield from _beyond(case)


def _beyond(case: Case) -> Iterator[Finding]:
    spec, goals = case.spec, case.spec.goals
    batch, context = spec.workload.concurrency, case.mean_context
    step = case.step_seconds(batch, context, "nominal")
    prompt = case.prompt_seconds(spec.workload.prompt_len, "nominal")
    where = f"at batch {batch} and context {context} on {case.hardware.name}, nominal rates"
    one_a_step = spec.capabilities.speculative == "none"
    if one_a_step and goals.tpot_ms is not None and goals.tpot_ms < step * 1e3:
        reason = f"{goals.tpot_ms:g} ms is below the floor of {step * 1e3:.3g} ms {where}"
        remedy = f"ask {step * 1e3:.3g} ms or more, or fewer bytes a token"
        yield Finding(field="goals.tpot_ms", reason=reason, remedy=remedy)
    if one_a_step and goals.tok_s is not None and goals.tok_s > batch / step:
        reason = f"{goals.tok_s:g} tok/s is beyond the floor of {batch / step:,.0f} tok/s {where}"
        remedy = f"ask at most {batch / step:,.0f}, or fewer bytes a token"
        yield Finding(field="goals.tok_s", reason=reason, remedy=remedy)
    if goals.ttft_ms is not None and goals.ttft_ms < prompt * 1e3:
        reason = (
            f"{goals.ttft_ms:g} ms is below the floor of {prompt * 1e3:.3g} ms for a prompt of "
            f"{spec.workload.prompt_len} on {case.hardware.name}, nominal rates"
        )
        remedy = f"ask {prompt * 1e3:.3g} ms or more, or a shorter prompt"
        yield Finding(field="goals.ttft_ms", reason=reason, remedy=remedy)


def warn_copies(case: Case) -> Iterator[Finding]:
    tp, kv = case.spec.parallel.tp, case.dims.num_key_value_heads
    if tp > kv:
        reason = f"{tp} devices share {kv} KV heads, so each head is kept {tp // kv} times"
        remedy = f"more than {kv} devices save no cache memory a sequence"
        yield Finding(field="parallel.tp", reason=reason, remedy=remedy)


def warn_cached(case: Case) -> Iterator[Finding]:
    if not case.fits_cache():
        return
    size = case.hardware.cache_bytes / 1e6
    reason = (
        f"a step's bytes fit the last-level cache ({size:,.0f} MB), so memory floors may not bind"
    )
    yield Finding(
        field="hardware", reason=reason, remedy="a rate beyond the floor is possible here"
    )
    for finding in _beyond(case):
        yield finding.model_copy(update={"remedy": "possible only from the cache"})


def warn_speculation(case: Case) -> Iterator[Finding]:
    if case.spec.capabilities.speculative != "none":
        reason = "floors here are per step, and a step may yield several tokens"
        remedy = "goals per token were not held against them"
        yield Finding(field="capabilities.speculative", reason=reason, remedy=remedy)


SHAPE_CHECKS: tuple[Check, ...] = (
    check_devices,
    check_divisions,
    check_blocks,
    check_weights,
    check_modules,
    check_activations,
    check_cache_types,
    check_graphs,
    check_reuse,
    check_speculation,
    check_draft,
    check_workload,
    check_shares,
)
SIZE_CHECKS: tuple[Check, ...] = (check_memory, check_goals)
WARNING_CHECKS: tuple[Check, ...] = (warn_copies, warn_cached, warn_speculation)
