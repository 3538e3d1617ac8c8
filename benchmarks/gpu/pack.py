"""Make Gemma 3 270M and its corpora small enough to travel to a machine without a network, in pieces.

    python benchmarks/gpu/pack.py pack --corpora DIR --output-dir packed --piece-mib 12
    python benchmarks/gpu/pack.py unpack packed --output gemma-cut            (its corpora are in gemma-cut/corpora)
    python benchmarks/gpu/pack.py check gemma-cut

DIR has the files of `CORPORA` and `TEXTS` below. Two thirds of the model's parameters are embeddings of tokens that a
small data set never uses. `pack` keeps the rows of the tokens that occur, with the merges that make them, so the cut
tokenizer encodes these texts to the same tokens. The other weights travel as the bytes of the GGUF file; `unpack`
dequantises them as labkit does. `check` compares the unpacked model with the full one: the tokens of every text, every
weight bit for bit, and some logits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import sys
import tempfile
import time
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, dequantize, get_tensor_name_map
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from labkit.datasets import embedded, readers  # noqa: E402
from labkit.models import cache, load  # noqa: E402
from labkit.models.registry import REGISTRY  # noqa: E402

CORPORA = {
    "wikigold": "ner:wikigold/wikigold.conll.txt",
    "xquad": "qa:xquad_en/xquad.en.json",
    "wnut17": "ner:wnut17/wnut17train.conll",
}
TEXTS = ("wikitext2_valid_test/valid.txt", "wikitext2_valid_test/test.txt")  # for the adaptation before a task
CARD = REGISTRY["gemma3-270m"]
EMBEDDING = "token_embd.weight"
RESERVED = re.compile(r"<unused[1-9]\d*>")  # <unused0> stays: labkit takes it as the mask token
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def texts_in(corpora: Path) -> list[str]:
    """The texts of Field Notes and the data sets, and the paragraphs of the plain files, as labkit tokenises them."""
    sources = [embedded.read(task, "field-notes", side) for task in ("qa", "ner") for side in embedded.SPLITS]
    sources += [readers.read(task, corpora / file) for task, _, file in (s.partition(":") for s in CORPORA.values())]
    texts: list[str] = []
    for example in chain.from_iterable(sources):
        texts += [example.question, example.context] if hasattr(example, "question") else [example.text]
    for file in TEXTS:
        texts += [line.strip() for line in (corpora / file).read_text(encoding="utf-8").split("\n")]
    return list(dict.fromkeys(filter(None, texts)))


def cut(spec: dict[str, Any], texts: list[str]) -> tuple[dict[str, Any], list[int]]:
    """The tokenizer.json `spec` with only the tokens that `texts` need, and the old id of each new one, ascending.

    Kept are the tokens of the encodings and those that they are merged from, all characters and bytes, and the added
    tokens. A merge that took place in these texts is still there, in its order, so the encodings are the same.
    """
    full, model = Tokenizer.from_str(json.dumps(spec)), spec["model"]
    token_of = {number: token for token, number in model["vocab"].items()}
    used: set[int] = set()
    for full.encode_special_tokens in (False, True):
        used.update(number for encoding in full.encode_batch_fast(texts) for number in encoding.ids)
    rank = {tuple(pair): place for place, pair in enumerate(model["merges"])}
    added = [token for token in spec["added_tokens"] if not RESERVED.fullmatch(token["content"])]
    kept = {token_of[number] for number in used if number in token_of}
    kept |= {part for token in list(kept) for part in _merged_from(token, rank)}
    kept |= {token["content"] for token in added} | {token for token in model["vocab"] if BYTE.fullmatch(token)}
    kept |= set().union(*texts, "▁") & model["vocab"].keys()
    old_ids = sorted(model["vocab"][token] for token in kept)
    vocabulary = {token_of[old]: new for new, old in enumerate(old_ids)}
    merges = [[a, b] for a, b in model["merges"] if {a, b, a + b} <= kept]
    smaller = spec | {"model": model | {"vocab": vocabulary, "merges": merges}}
    smaller["added_tokens"] = [token | {"id": vocabulary[token["content"]]} for token in added]
    if (processor := spec.get("post_processor")) and "special_tokens" in processor:
        special = processor["special_tokens"].items()
        special = {name: value | {"ids": [vocabulary[token] for token in value["tokens"]]} for name, value in special}
        smaller["post_processor"] = processor | {"special_tokens": special}
    return smaller, old_ids


def _merged_from(token: str, rank: dict[tuple[str, str], int]) -> set[str]:
    """Every token that byte-pair encoding makes on the way from the characters of `token` to the token."""
    parts, tokens = list(token), set(token)
    while ranked := [(rank[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in rank]:
        place = min(ranked)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        tokens.add(parts[place])
    return tokens


def pack(corpora: Path, folder: Path, piece_bytes: int) -> dict[str, Any]:
    """Write manifest.json and the pieces into `folder`; returns the manifest."""
    source = _cached()
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    files = {name: (source / name).read_text(encoding="utf-8") for name in names}
    tokenizer, old_ids = cut(json.loads(files["tokenizer.json"]), texts_in(corpora))
    new_id = {old: new for new, old in enumerate(old_ids)}
    files["tokenizer.json"] = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads(files[name])
        settings |= {key: new_id[value] for key, value in settings.items() if key.endswith("_token_id")}
        settings |= {"vocab_size": len(old_ids)} if name == "config.json" else {}
        files[name] = json.dumps(settings, indent=2)
    for file in (*(source.partition(":")[2] for source in CORPORA.values()), *TEXTS):
        files[f"corpora/{file}"] = (corpora / file).read_text(encoding="utf-8")
    stream = [lzma.compress(json.dumps(files).encode())]
    tensors = []
    with tempfile.TemporaryDirectory() as work:
        file = Path(work, "whole.gguf")
        file.write_bytes(b"".join(part.read_bytes() for part in CARD.origin.paths()))
        for tensor in GGUFReader(file).tensors:
            data = tensor.data[old_ids] if tensor.name == EMBEDDING else tensor.data
            stream.append(np.ascontiguousarray(data).tobytes())
            facts = {"name": tensor.name, "type": tensor.tensor_type.name, "stored": data.shape}
            tensors.append(facts | {"width": int(tensor.shape[0]), "bytes": len(stream[-1])})
    whole, folder = b"".join(stream), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pieces = {}
    for number, start in enumerate(range(0, len(whole), piece_bytes)):
        piece = whole[start : start + piece_bytes]
        (folder / f"piece-{number:02}").write_bytes(piece)
        pieces[f"piece-{number:02}"] = hashlib.sha256(piece).hexdigest()
    manifest = {"model": CARD.name, "files_bytes": len(stream[0]), "tensors": tensors, "pieces": pieces, "ids": old_ids}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return manifest


def _cached() -> Path:
    """The folder of the converted model; it is converted if it is missing."""
    load(CARD.name)
    return cache.cache_dir() / "models" / CARD.name


def unpack(folders: list[Path], output: Path) -> None:
    """Write the model folder `output` from the pieces in `folders`. SystemExit if one is missing or damaged."""
    files = {file.name: file for folder in folders for file in Path(folder).iterdir()}
    manifest = json.loads(files["manifest.json"].read_text(encoding="utf-8"))
    whole = bytearray()
    for name, digest in manifest["pieces"].items():
        piece = files[name].read_bytes() if name in files else b""
        if hashlib.sha256(piece).hexdigest() != digest:
            sys.exit(f"{name} is {'damaged' if piece else 'missing'}; copy it again")
        whole += piece
    at = manifest["files_bytes"]
    output.mkdir(parents=True, exist_ok=True)
    for name, text in json.loads(lzma.decompress(whole[:at])).items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text, encoding="utf-8")
    tensors = {}
    for facts in manifest["tensors"]:
        kind = GGMLQuantizationType[facts["type"]]
        raw = np.frombuffer(whole, np.uint8, facts["bytes"], at)
        data = (raw.view(np.float32) if facts["type"] == "F32" else raw).reshape(facts["stored"])
        tensors[facts["name"]] = torch.tensor(dequantize(data, kind))
        at += facts["bytes"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(output))
    names, weights = get_tensor_name_map(MODEL_ARCH.GEMMA3, model.config.num_hidden_layers), {}
    for name, _ in model.named_parameters():
        values = tensors[names.get_name(name, try_suffixes=(".weight",))]
        weights[name] = (values - 1 if name.endswith("norm.weight") else values).bfloat16()  # llama.cpp stores 1 + w
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    (output / "kept_ids.json").write_text(json.dumps(manifest["ids"]), encoding="utf-8")


def check(folder: Path) -> str:
    """Compare the unpacked model with the full one; AssertionError where they differ."""
    texts = texts_in(folder / "corpora")
    smaller, full = (load(name, dtype="float32", device="cpu") for name in (folder, CARD.name))
    old_ids = torch.tensor(json.loads((folder / "kept_ids.json").read_text(encoding="utf-8")))
    for options in ({}, {"add_special_tokens": False, "split_special_tokens": True}):
        ours, theirs = (lm.tokenizer(texts, verbose=False, **options)["input_ids"] for lm in (smaller, full))
        assert all(old_ids[torch.tensor(a, dtype=torch.long)].tolist() == b for a, b in zip(ours, theirs, strict=True))
    source = load_file(_cached() / "model.safetensors")
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(weight, source[name][old_ids] if "embed_tokens" in name else source[name]), name
    gap = 0.0
    for text in texts[:: max(1, len(texts) // 8)]:
        ids = smaller.tokenizer(text[:1000], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits, reference = smaller.model(ids).logits, full.model(old_ids[ids]).logits[..., old_ids]
        gap = max(gap, float((logits - reference).abs().max()))
    assert gap < 1e-3, f"the logits differ by {gap}"
    return f"{len(texts):,} texts have the same tokens, the weights are the same, the logits differ by {gap:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing, unpacking, checking = (commands.add_parser(name) for name in ("pack", "unpack", "check"))
    packing.add_argument("--corpora", type=Path, required=True, help="the folder with the data sets and texts")
    packing.add_argument("--output-dir", type=Path, required=True)
    packing.add_argument("--piece-mib", type=int, default=12, help="size of a piece (default 12)")
    unpacking.add_argument("folders", nargs="+", type=Path, help="folders with the pieces and manifest.json")
    unpacking.add_argument("--output", type=Path, required=True, help="the model folder to write")
    checking.add_argument("folder", type=Path, help="the unpacked model")
    options, began = parser.parse_args(), time.perf_counter()
    if options.command == "pack":
        manifest = pack(options.corpora, options.output_dir, options.piece_mib << 20)
        print(f"{len(manifest['ids']):,} tokens in {len(manifest['pieces'])} pieces", end="")
    elif options.command == "unpack":
        unpack(options.folders, options.output)
        print(f"{options.output} written", end="")
    else:
        print(check(options.folder), end="")
    print(f" ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
