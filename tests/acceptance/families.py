"""Model families, each a tiny model of random weights: our logits against the family's own forward, in float32.

    python -m tests.acceptance.families            # all of them: about a minute
    python -m tests.acceptance.families --quick
    python -m tests.acceptance.families --compiled # the same with compiled layers: about ten minutes

Prompts are computed in chunks cut around the window, from scattered blocks, decoding at the end. Families that paged
attention would make wrong must be refused at the load, with the reason. Exit code 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from transformers.utils import logging

from engine.context import Context
from engine.protocol import EngineLimits, GenerationRequest, Places, SamplingParams
from engine.scheduler import Chunk
from engine.torch_engine import TorchEngine
from policies.errors import LoadFailed
from tests.engine_helpers import plain_model, save_tiny

BOUND = 1e-4  # of the largest logit
WINDOW = 12
CUTS = (5, 11, 17, 30, 38, 39, 40, 41)  # chunks, then single tokens
PROMPT = [2 + (7 * n * n + 3 * n) % 300 for n in range(CUTS[-1])]
LIMITS = EngineLimits(max_model_len=128, block_size=4, step_tokens=16, max_running=8)

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0, "tie_word_embeddings": False, "sliding_window": WINDOW, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "ffn_dim": 96,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
SOFTCAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
RIGHT: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {"use_sliding_window": True, "max_window_layers": 1}, "qwen3": {}, "mistral": {},
    "gemma2": {**ALTERNATING, **SOFTCAPS, "query_pre_attn_scalar": 16},
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 16}, "gpt_oss": {**ALTERNATING}, "phi3": {},
    "afmoe": {}, "apertus": {}, "arcee": {}, "cohere": {}, "cohere2": {**ALTERNATING}, "ernie4_5": {},
    "exaone4": {**ALTERNATING}, "gemma": {}, "glm": {}, "glm4": {}, "gpt2": {"n_positions": 128}, "gpt_bigcode": {},
    "gpt_neox": {}, "granite": {}, "granitemoe": {}, "helium": {}, "hunyuan_v1_dense": {}, "jetmoe": {},
    "ministral": {}, "mixtral": {}, "nemotron": {}, "olmo": {}, "olmo2": {}, "olmo3": {**ALTERNATING}, "opt": {},
    "persimmon": {}, "phi": {}, "qwen2_moe": {}, "qwen3_moe": {}, "seed_oss": {}, "smollm3": {}, "stablelm": {},
    "starcoder2": {},
}  # fmt: skip
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
             "original_max_position_embeddings": 64}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon": ("falcon", {"alibi": False, "num_kv_heads": 4}, "do not dispatch"),
    "falcon with ALiBi": ("falcon", {"alibi": True, "num_kv_heads": 4}, "ALiBi"),
    "bloom": ("bloom", {}, "ALiBi"),
    "mpt": ("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, "ALiBi"),
    "diffllama": ("diffllama", {}, "do not dispatch"),
    "mamba": ("mamba", {}, "linear_attention"),
    "jamba": ("jamba", {}, "linear_attention"),
    "recurrent_gemma": ("recurrent_gemma", {}, "linear_attention"),
    "llama4_text": ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    "phimoe (window in a mask)": ("phimoe", {}, "window of 12 tokens"),
    "gpt2 over an encoder": ("gpt2", {"add_cross_attention": True}, "cross attention"),
    "bart": ("bart", {"d_model": 64, "decoder_layers": 2, "encoder_layers": 2}, "cross attention"),
    "llama with m-rope": ("llama", {"rope_parameters": MROPE}, "three positions"),
    "phi3 with longrope": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}, "longrope"),
}
QUICK = ("llama", "gemma2", "gpt_oss", "qwen2"), ("falcon", "phimoe (window in a mask)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one family."""

    family: str
    features: str
    error: float | None  # of the largest logit
    said: str
    good: bool
    layers: str = ""


def tiny(family: str, **more: Any) -> Any:
    """A configuration of that family with small sizes, of those it knows."""
    known = AutoConfig.for_model(family)
    sizes = {n: v for n, v in SIZES.items() if hasattr(known, n) and not isinstance(vars(type(known)).get(n), property)}
    return AutoConfig.for_model(family, **{**sizes, **more})


def check_right(family: str, directory: Path, *, compiled: bool = False) -> Verdict:
    path = save_tiny(tiny(family, **RIGHT[family]), directory / "model")
    engine = TorchEngine(path, 2 * 2**30, LIMITS, places=Places(code=str(directory / "layers") if compiled else ""))
    try:
        engine.load()
        engine.warm()
        layers = engine.settle() if compiled else ""
    except LoadFailed as refused:
        return Verdict(family, "", None, refused.message, good=False)
    ours = _in_chunks(engine)
    with torch.inference_mode():
        whole = plain_model(path)(torch.tensor([PROMPT]), use_cache=False).logits[0].float()
    theirs = whole[[cut - 1 for cut in CUTS]]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    return Verdict(family, _features(engine), error, "right" if error <= BOUND else "WRONG", error <= BOUND, layers)


def check_refused(name: str, directory: Path) -> Verdict:
    family, more, reason = REFUSED[name]
    config = tiny(family, **more)
    config.save_pretrained(directory)
    if family not in ("bart", "mamba", "jamba", "recurrent_gemma"):  # refused by their config alone
        save_tiny(config, directory)
    try:
        TorchEngine(directory, 2 * 2**30, LIMITS).load()
    except LoadFailed as refused:
        said = refused.message.removeprefix(f"{directory.name}: ")
        return Verdict(name, "", None, said, reason in said)
    return Verdict(name, "", None, f"LOADED, and should be refused: {reason}", good=False)


def _in_chunks(engine: TorchEngine) -> torch.Tensor:
    """Logits ``[len(CUTS), V]`` at the end of each chunk."""
    blocks = list(range(3, 3 + -(-len(PROMPT) // LIMITS.block_size)))[::-1]
    begin, rows = 0, []
    for end in CUTS:
        request = GenerationRequest("family", 0, tuple(PROMPT[:end]), SamplingParams(1, 0), tenant="")
        context = Context(request, b"", 0.0)
        context.block_table = blocks
        rows.append(engine._runner.run([Chunk(context, begin, end - begin)], engine._kv)[0])
        begin = end
    return torch.stack(rows)


def _features(engine: TorchEngine) -> str:
    config = engine._runner.model.config
    windows = sum(layer.window is not None for layer in engine._recipe.layers)
    found = [f"window in {windows} of {len(engine._recipe.layers)} layers"] if windows else []
    found += ["softcap"] if getattr(config, "attn_logit_softcapping", None) else []
    found += ["sinks"] if any("sinks" in name for name, _ in engine._runner.model.named_parameters()) else []
    return ", ".join(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few families")
    parser.add_argument("--compiled", action="store_true", help="with compiled layers, where they can be")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    right, refused = QUICK if options.quick else (tuple(RIGHT), tuple(REFUSED))
    table, verdicts = Table("family", "features", "max logit error", "verdict", "layers"), []
    with tempfile.TemporaryDirectory() as directory:
        for number, name in enumerate((*right, *refused)):
            place = Path(directory) / str(number)
            place.mkdir()
            if number < len(right):
                verdict = check_right(name, place, compiled=options.compiled)
            else:
                verdict = check_refused(name, place)
            error = "" if verdict.error is None else f"{verdict.error:.1e}"
            said = verdict.said if number < len(right) else f"refused: {verdict.said}"
            table.add_row(verdict.family, verdict.features, error, said, verdict.layers)
            verdicts.append(verdict)
    console = Console(width=140)
    console.print(table)
    wrong = [verdict.family for verdict in verdicts if not verdict.good]
    console.print(f"{len(right)} families computed, {len(refused)} refused; otherwise than expected: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
