"""Owns the way from a model directory to something that can run: guards, arena, measurements, KV pool, warm-up."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from engine import device as machine
from engine import guards
from engine.attention import paged
from engine.attention.kv import KVMemory, LayerShape, bytes_per_token
from engine.attention.native import NativeAttention
from engine.attention.paged import Probe
from engine.canary import decoding, made_up_step
from engine.disk_tier import queued_blocks
from engine.memory import held_bytes, trim
from engine.native_code import NotNative
from engine.protocol import EngineLimits, LoadReport
from engine.quantised import native as products
from engine.recipe import KnownLayer, Recipe
from engine.runner import Runner
from engine.weights import Weights, fingerprint
from policies.errors import DoesNotFit, LoadFailed
from policies.preemption import KVCosts

PROBE = range(1, 9)  # tokens
LAST_PIECE = 3
NATIVE = "compiled"  # what attends, for people
NO_MEMORY = "can't allocate memory"  # how torch says it on the CPU
COPIED_BLOCKS = 8  # to measure what copying KV costs


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, or asleep and ready to wake."""

    weights: Weights
    runner: Runner
    kv: KVMemory
    host_kv: KVMemory
    limits: EngineLimits
    eos_token_ids: frozenset[int]
    vocabulary: int
    report: LoadReport
    tokenizer: Tokenizer
    threads: int  # for decoding
    recipe: Recipe  # its canary is still to be found out by a first load


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be loaded, and into how much memory."""

    path: Path
    memory_bytes: int
    limits: EngineLimits
    dtype: torch.dtype
    device: str
    code: str = ""  # see ``Places``


def load_model(order: Order) -> Loaded:
    """Load, refuse what would be silently wrong, measure, and allocate what memory is left as KV pool.

    KV bytes = memory_bytes − weights − activation peak of the largest step − process residual.
    """
    begin = time.monotonic()
    path, dtype, device = order.path, order.dtype, order.device
    _one_thread(device)
    residual = held_bytes()
    config = guards.read_config(path)
    limits = guards.fit_window(path.name, config, order.limits)
    hashing = ThreadPoolExecutor(1, "fingerprint")
    identity = hashing.submit(fingerprint, path)
    hashing.shutdown(wait=False)
    tokenizer = _tokenizer(path)  # part of the residual: large ones take 90 MB
    try:
        runner, weights, layers = _take_over(order, config, limits.block_size)
    except (AttributeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error):
            raise
        raise LoadFailed(f"{path.name}: its model code fails: {type(error).__name__}: {error}") from error
    guards.check_windows(config, layers, limits)
    _attend_natively(runner, order, layers)
    trim()
    peak, prefill_seconds = _measure(runner, layers, limits, dtype, device)
    trim()
    recipe = Recipe(
        fingerprint=identity.result(),
        layers=tuple(KnownLayer(index, *dataclasses.astuple(shape)) for index, shape in layers.items()),
        packed=weights.packed_layers,
        threads=torch.get_num_threads(),
        peak_bytes=peak,
        # now, not before: building the model has imported its code, and the steps have compiled their kernels
        process_bytes=max(residual + weights.private_bytes, held_bytes() - weights.nbytes),
        prefill_seconds=prefill_seconds,
        copy_seconds=0.0,
        canary=(),
        native=runner.attention == NATIVE,
    )
    loaded = _assemble(order, config, limits, runner, weights, tokenizer, recipe)
    recipe = dataclasses.replace(recipe, copy_seconds=_copy_seconds(loaded.kv, loaded.host_kv, limits.block_size))
    return dataclasses.replace(
        loaded,
        recipe=recipe,
        report=dataclasses.replace(loaded.report, seconds=time.monotonic() - begin, kv_costs=_costs(recipe)),
    )


def load_known(order: Order, recipe: Recipe) -> Loaded:
    """The same by the findings of an earlier load of the same files: no weight is read, and it is asleep."""
    begin = time.monotonic()
    _one_thread(order.device)
    config = guards.read_config(order.path)
    limits = guards.fit_window(order.path.name, config, order.limits)
    tokenizer = _tokenizer(order.path)
    model = skeleton(config, order.dtype)
    weights = Weights(model, order.path, order.device, fold=_can_fold(order), known=recipe.packed)
    _move_buffers(model, order.device)
    trim()
    recipe = dataclasses.replace(recipe, process_bytes=max(recipe.process_bytes, held_bytes()))
    runner = Runner(model, order.device, limits.block_size)
    _attend_natively(runner, order, _layers(recipe))
    if recipe.native and runner.attention != NATIVE:
        raise LoadFailed(f"the recipe is of native attention, and this load's is by {runner.attention}")
    loaded = _assemble(order, config, limits, runner, weights, tokenizer, recipe)
    loaded.kv.give_back()
    return dataclasses.replace(
        loaded,
        threads=machine.threads_to_try(recipe.threads),
        report=dataclasses.replace(loaded.report, seconds=time.monotonic() - begin, kv_costs=_costs(recipe)),
    )


def _one_thread(device: str) -> None:
    if device == "cpu":
        torch.set_num_threads(1)  # beside a busy neighbour two threads load slower; decoding's count is measured


def _costs(recipe: Recipe) -> KVCosts:
    return KVCosts(recipe.copy_seconds, recipe.prefill_seconds)


def _tokenizer(path: Path) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return tokenizer


def _assemble(
    order: Order,
    config: PretrainedConfig,
    limits: EngineLimits,
    runner: Runner,
    weights: Weights,
    tokenizer: Tokenizer,
    recipe: Recipe,
) -> Loaded:
    """Allocate KV from what memory is left, and say what there is."""
    dtype = order.dtype
    layers = _layers(recipe)
    host_kv = _host_kv(layers, limits, dtype)
    residual = recipe.process_bytes + host_kv.nbytes + _disk_queue_bytes(layers, limits, dtype)
    spare = order.memory_bytes - weights.nbytes - recipe.peak_bytes - residual
    why = (
        f"memory_bytes {order.memory_bytes} − weights {weights.nbytes} − activation peak {recipe.peak_bytes} "
        f"− kv_host {host_kv.nbytes} − process {residual - host_kv.nbytes}"
    )
    kv = _allocate(spare, layers, limits, dtype, order.device, why)
    report = LoadReport(
        weight_bytes=weights.nbytes,
        kv_bytes=kv.nbytes,
        kv_capacity_tokens=kv.num_slots,
        peak_bytes=recipe.peak_bytes,
        residual_bytes=residual,
        fingerprint=recipe.fingerprint,
        dtype=str(dtype),
        seconds=0.0,
        kv_host_capacity_tokens=host_kv.num_slots,
        window_tokens=_window(layers),
    )
    eos = _eos(order.path, config)
    vocabulary, threads = config.vocab_size, recipe.threads
    return Loaded(weights, runner, kv, host_kv, limits, eos, vocabulary, report, tokenizer, threads, recipe)


def _layers(recipe: Recipe) -> dict[int, LayerShape]:
    return {k.index: LayerShape(k.kv_heads, k.head_dim, k.value_dim, k.window) for k in recipe.layers}


def _can_fold(order: Order) -> bool:
    """Is there code for products with folded weights?"""
    if order.device != "cpu" or order.dtype != torch.float32 or not order.code:
        return False
    try:
        products.load(Path(order.code))
    except NotNative:
        return False
    return True


def _attend_natively(runner: Runner, order: Order, layers: dict[int, LayerShape]) -> None:
    """Where that can be; else it says why not."""
    if order.device != "cpu":
        return
    if not order.code:
        runner.attention = "torch: compile_layers is off"
        return
    try:
        runner.step = NativeAttention(Path(order.code), layers, order.limits.block_size, order.dtype).step
        runner.attention = NATIVE
    except NotNative as error:
        runner.attention = f"torch: {error}"


def _build(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=paged.NAME)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        if paged.NAME not in str(error):
            raise LoadFailed(f"{path.name}: transformers cannot build it: {said}") from error
        every = list(range(config.num_hidden_layers))  # its layers choose their attention from a table of their own
        raise guards.not_dispatched(config, every, f" ({said})") from error
    return model.eval()


def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The model without weights: its buffers are computed, its parameters have a shape and no memory."""
    with init_empty_weights(include_buffers=False):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=paged.NAME
        )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            nan = torch.full((1,) * parameter.dim(), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, torch.nn.Parameter(nan, requires_grad=False))
    model.tie_weights()  # type: ignore[operator]
    return model.eval()


def _take_over(
    order: Order, config: PretrainedConfig, block_size: int
) -> tuple[Runner, Weights, dict[int, LayerShape]]:
    """Build the model and give its weights our own memory; its scores must not change by that."""
    path, dtype, device, fold = order.path, order.dtype, order.device, _can_fold(order)
    rounding = torch.float32 if device == "cpu" else dtype  # another device adds in another order
    for pack in (device == "cpu", False):
        model = _build(path, config, dtype)
        built = Runner(model, "cpu", block_size)
        layers, plain = _probe(built, config)
        guards.check_scores(config, plain, _own_scores(model, built), dtype)
        weights = Weights(model, path, device, pack=pack, fold=fold and pack)
        _move_buffers(model, device)
        runner = Runner(model, device, block_size)
        _, moved = _probe(runner, config)
        if guards.same_scores(moved.cpu(), plain, rounding):
            guards.check_pieces(config, _in_pieces(runner, layers, block_size, dtype, device), moved, dtype)
            return runner, weights, layers
        if not weights.packed:  # else: model code that reads a linear layer's weight itself; leave it plain
            break
    raise LoadFailed(f"{path.name}: scores changed when its weights moved; this model family is not supported")


def _probe(runner: Runner, config: PretrainedConfig) -> tuple[dict[int, LayerShape], torch.Tensor]:
    """Layers and scores. A model whose layers do not all come through our attention is refused: silently wrong."""
    probe, cause, scores = Probe(), "", torch.empty(0)
    try:
        probe, scores = runner.probe(PROBE)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # model code that never heard of the registry
        cause = f" ({type(error).__name__}: {error})"
    wrong = [i for i in range(config.num_hidden_layers) if probe.dispatches.get(i) != 1]
    if wrong:
        raise guards.not_dispatched(config, wrong, cause)
    return dict(sorted(probe.layers.items())), scores


def _in_pieces(
    runner: Runner, layers: dict[int, LayerShape], block_size: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """The probe's scores when its last tokens come in a step of their own, over KV of the first."""
    kv = KVMemory(layers, -(-len(PROBE) // block_size) * block_size, dtype, device)
    made_up_step(runner, kv, block_size, [list(PROBE[:-LAST_PIECE])])()
    return made_up_step(runner, kv, block_size, [list(PROBE)], start=len(PROBE) - LAST_PIECE)()


def _move_buffers(model: torch.nn.Module, device: str) -> None:
    """Those that no file holds, such as rotary frequencies: they are small, and stay while the model sleeps."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device:
                module._buffers[name] = buffer.to(device)


def _own_scores(model: torch.nn.Module, runner: Runner) -> torch.Tensor:
    """The same by transformers' own attention."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        return runner.plain(PROBE)
    finally:
        model.set_attn_implementation(paged.NAME)  # type: ignore[operator]


def _measure(
    runner: Runner, layers: dict[int, LayerShape], limits: EngineLimits, dtype: torch.dtype, device: str
) -> tuple[int, float]:
    """Threads for decoding; then the activation peak of the largest step, and its seconds per token."""
    slots = -(-limits.largest_step // limits.block_size) * limits.block_size
    scratch = KVMemory(layers, slots, dtype, device)
    rows = min(limits.max_running, limits.step_tokens)
    if device == "cpu":
        machine.choose_threads(decoding(runner, scratch, limits))
        trim()  # pages it has used would be missing from the peak
    per_context = max(1, limits.largest_step // rows)
    widest = made_up_step(runner, scratch, limits.block_size, [[1] * per_context] * rows)
    tokens = min(limits.largest_step, limits.max_model_len)
    longest = made_up_step(runner, scratch, limits.block_size, [[1] * tokens])
    peak = max(machine.peak_of(widest), machine.peak_of(longest))
    return peak, machine.seconds_of(longest) / tokens


def _allocate(
    spare: int, layers: dict[int, LayerShape], limits: EngineLimits, dtype: torch.dtype, device: str, why: str
) -> KVMemory:
    block_bytes = bytes_per_token(layers, dtype) * limits.block_size
    wanted = limits.max_running * -(-limits.max_model_len // limits.block_size)
    blocks = min(spare // block_bytes, wanted)
    if blocks < 2:
        raise DoesNotFit(f"{why} = {spare} bytes for KV; two blocks need {2 * block_bytes}. Raise memory_bytes")
    return KVMemory(layers, blocks * limits.block_size, dtype, device)


def _host_kv(layers: dict[int, LayerShape], limits: EngineLimits, dtype: torch.dtype) -> KVMemory:
    """Room for KV that left the device; its pages are taken when they are first written."""
    block_bytes = bytes_per_token(layers, dtype) * limits.block_size
    blocks = limits.kv_host_bytes // block_bytes
    if limits.kv_host_bytes and not blocks:
        raise DoesNotFit(f"kv_host {limits.kv_host_bytes} bytes is less than one block of {block_bytes}")
    return KVMemory(layers, blocks * limits.block_size, dtype, "cpu")


def _disk_queue_bytes(layers: dict[int, LayerShape], limits: EngineLimits, dtype: torch.dtype) -> int:
    """What KV on its way to disk and back may take."""
    block_bytes = bytes_per_token(layers, dtype) * limits.block_size
    return 2 * queued_blocks(block_bytes) * block_bytes if limits.kv_disk_bytes else 0


def _window(layers: dict[int, LayerShape]) -> int | None:
    """How far the layer that sees farthest sees; None: some layer sees everything."""
    windows = [shape.window for shape in layers.values()]
    return None if None in windows else max(window for window in windows if window is not None)


def _copy_seconds(kv: KVMemory, host_kv: KVMemory, block_size: int) -> float:
    """Of one block, device to host memory."""
    blocks = min(COPIED_BLOCKS, kv.num_slots // block_size, host_kv.num_slots // block_size)
    if not blocks:
        return 0.0
    pairs = [(block, block) for block in range(blocks)]
    kv.copy_blocks(host_kv, pairs, block_size)  # the first one takes the pages
    return machine.seconds_of(lambda: kv.copy_blocks(host_kv, pairs, block_size)) / blocks


def _eos(path: Path, config: PretrainedConfig) -> frozenset[int]:
    found: set[int] = set()
    file = path / "generation_config.json"
    generation = json.loads(file.read_text()) if file.is_file() else {}
    for value in (generation.get("eos_token_id"), getattr(config, "eos_token_id", None)):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
