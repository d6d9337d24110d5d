"""The card of exported weights: what they are, their numbers and where these are from, how to load them, limits."""

from __future__ import annotations

import json
from typing import Any

from torchcaps.models.registry import find_preset
from torchcaps.results import Result

CITATIONS = {
    "Sabour et al. 2017": "S. Sabour, N. Frosst, G. E. Hinton. Dynamic routing between capsules. NeurIPS 2017.",
    "Hinton et al. 2018": "G. E. Hinton, S. Sabour, N. Frosst. Matrix capsules with EM routing. ICLR 2018.",
    "Li et al. 2018": "H. Li, X. Guo, B. Dai, W. Ouyang, X. Wang. Neural network encapsulation. ECCV 2018.",
    "Choi et al. 2019": "J. Choi, H. Seo, S. Im, M. Kang. Attention routing between capsules. ICCV Workshops 2019.",
    "Tsai et al. 2020": "Y.-H. H. Tsai, N. Srivastava, H. Goh, R. Salakhutdinov. Capsules with inverted dot-product "
    "attention routing. ICLR 2020.",
    "Mazzia et al. 2021": "V. Mazzia, F. Salvetti, M. Chiaberge. Efficient-CapsNet: capsule network with "
    "self-attention routing. Scientific Reports 11, 2021.",
}


def citation(preset: str) -> str:
    """Of the paper that a preset is from; its short name where that is all there is."""
    paper = find_preset(preset).paper
    return CITATIONS.get(paper, paper)


def model_card(name: str, about: dict[str, Any], line: Result, files: list[str]) -> str:
    """In Markdown, with the header that model hubs read.

    Args:
        about: as config.json has it.
        files: names of the other files in the folder.
    """
    parts = [
        _header(name, about, line),
        f"# {name}",
        _what(about),
        "## Numbers\n\n" + _numbers(line),
        "## Loading\n\n" + _loading(name, about, "model.onnx" in files),
        "## Intended use and limits\n\n" + _limits(about),
        f"## Citation\n\n{about['citation']}\n\nPlease cite the paper for the method, and torchcaps for the weights.",
        "## Licence\n\nApache-2.0. `SHA256SUMS` has the checksum of every file, `results.jsonl` the full record.",
    ]
    return "\n\n".join(parts) + "\n"


def _header(name: str, about: dict[str, Any], line: Result) -> str:
    """YAML, of which JSON is a part: values are written as JSON has them."""
    word = json.dumps
    return "\n".join(
        [
            "---",
            f"license: {about['licence']}",
            "library_name: torchcaps",
            "pipeline_tag: image-classification",
            "tags: [capsule-network, pytorch, image-classification]",
            f"datasets: [{word(about['data'])}]",
            "model-index:",
            f"- name: {word(name)}",
            "  results:",
            "  - task: {type: image-classification}",
            f"    dataset: {{name: {word(about['data'])}, type: {word(about['data'])}, split: test}}",
            f"    metrics: [{{type: accuracy, value: {word(round(1 - line.test['error'], 6))}}}]",
            "---",
        ]
    )


def _what(about: dict[str, Any]) -> str:
    paper = find_preset(about["preset"]).paper
    options = ", ".join(f"{word}={value!r}" for word, value in about["options"].items())
    decoder = f" and {about['decoder_parameters']:,} in its decoder" if about["decoder_parameters"] else ""
    return (
        f"The network `{about['preset']}` of torchcaps ({paper}){' with ' + options if options else ''}, trained on "
        f"{about['data']}. It takes images of {' x '.join(map(str, about['image']))} (channels, height, width) and "
        f"tells {about['classes']} classes apart: {', '.join(about['class_names'])}. It has {about['parameters']:,} "
        f"parameters{decoder}, stored in {about['dtype']}."
    )


def _numbers(line: Result) -> str:
    rows = [("test", line.test)]
    if line.validation:
        rows.append(("validation", line.validation))
    table = ["| split | images | error % | standard error |", "| --- | ---: | ---: | ---: |"]
    for word, figures in rows:
        error, spread = (100 * figures[key] for key in ("error", "standard_error"))
        table.append(f"| {word} | {figures['images']:,} | {error:.2f} | {spread:.2f} |")
    recipe, reads = line.recipe, "once" if line.test_reads == 1 else f"{line.test_reads} times"
    share = f", its share of {line.together} seeds at once" if line.together > 1 else ""
    took = f" in {line.seconds:,.0f} s on {line.device}{share}" if line.seconds and line.device else ""
    comma = "," if took else ""
    shortened = f", shortened from {line.planned}{comma}" if line.shortened else ""
    epoch = f"epoch {line.epoch} of" if line.epoch else "the last of"
    chosen = "the best on the validation set" if line.selected == "best" else "the last one"
    sentences = [
        f"Row `{line.table}:{line.row}`, seed {line.seed}, trained for "
        f"{line.epochs} epoch{'s' * (line.epochs != 1)}{shortened}{took}.",
        f"The weights are those of {epoch} these epochs, {chosen}; the test set was read {reads}.",
        f"Protocol: {recipe.get('protocol') or 'none but the data as they are'}; "
        f"loss {recipe['loss']}, optimiser {recipe['optimizer']}, batches of {recipe['batch_size']}.",
        f"Code: commit {line.commit[:12]}{' with changes' if line.dirty else ''}.",
    ]
    if "per_digit_error" in line.test:
        sentences.insert(
            0, f"The error is that of the exact match; per digit {100 * line.test['per_digit_error']:.2f} %."
        )
    views = recipe["data_args"].get("crops")
    if views:
        sentences.append(f"Each test image counts by the sum over {views} views of it.")
    return "\n".join(table) + "\n\n" + " ".join(sentences)


def _loading(name: str, about: dict[str, Any], onnx: bool) -> str:
    first = ", ".join(map(str, about["image"]))
    code = [
        "```python",
        "import torch, torchcaps",
        "",
        f"model = torchcaps.load_pretrained({name!r})  # this folder",
        f"output = model(torch.rand(1, {first}))",
        "output.probabilities, output.capsules",
        "```",
    ]
    text = "\n".join(code) + (
        f"\n\nWhat is done to an image first: {'; then '.join(f'`{step}`' for step in about['input'])}. "
        f"From a shell, `torchcaps predict {name} IMAGE` does all of that with images of any size."
    )
    if onnx:
        text += " `model.onnx` takes `images`, treated in the same way, in batches of any size."
    return text


def _limits(about: dict[str, Any]) -> str:
    threshold = (
        f"Images whose best class is below {about['threshold']:.3f} are better called none of these; that was chosen "
        "so that 99 % of the recognised validation images keep their class. "
        if about["threshold"] is not None
        else ""
    )
    return (
        f"For research and teaching: to look at capsules, to compare methods, to start from. The network knows "
        f"images as those of {about['data']} and nothing else; pictures of other things get a class too. {threshold}"
        "It has not been tested for fairness, robustness or safety, and should decide nothing about people."
    )
