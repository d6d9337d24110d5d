"""The card of exported weights: what they are, their numbers and where these are from, how to load them, limits.

It follows from the folder's config.json and results.jsonl, and from the results that the run's line is in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torchcaps.export.record import numbers, several, training, views
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
BACKBONES = {  # of which paper a backbone is that is not its preset's own
    "plain": "S. An, M. Lee, S. Park, H. Yang, J. So. An ensemble of simple convolutional neural network models for "
    "MNIST digit recognition. arXiv:2008.10400, 2020.",
    "resnet": CITATIONS["Tsai et al. 2020"],
}
TAUGHT = "G. Hinton, O. Vinyals, J. Dean. Distilling the knowledge in a neural network. arXiv:1503.02531, 2015."
TRIVIAL = "S. Müller, F. Hutter. TrivialAugment: tuning-free yet state-of-the-art data augmentation. ICCV 2021."
INSTALL = (
    "torchcaps needs Python 3.10 or newer and torch 2.10 or newer; in a clone of its repository "
    "`pip install '.[data]'` installs it."
)


def citation(preset: str) -> str:
    """Of the paper that a preset is from; its short name where that is all there is."""
    paper = find_preset(preset).paper
    return CITATIONS.get(paper, paper)


def model_card(
    name: str, about: dict[str, Any], line: Result, files: Sequence[str], seeds: Sequence[Result] = ()
) -> str:
    """In Markdown, with the header that model hubs read.

    Args:
        about: as config.json has it.
        files: names of the other files in the folder.
        seeds: all of this recipe, as `seeds_of` finds them.
    """
    parts = [
        _header(name, about, line),
        f"# {name}",
        _what(about),
        "## Numbers\n\n" + numbers(line, about["dtype"], seeds),
        "## Use\n\n" + _use(name, about, line, "model.onnx" in files),
        "## Training\n\n" + training(name, line),
        "## Intended use and limits\n\n" + _limits(about),
        "## Citation\n\n" + _cited(about, line.recipe),
        "## Licence\n\nApache-2.0. `SHA256SUMS` has the checksum of every file, `results.jsonl` the full record.",
    ]
    return "\n\n".join(parts) + "\n"


def _cited(about: dict[str, Any], recipe: dict[str, Any]) -> str:
    backbone = str(about["options"].get("backbone", "")).rstrip("0123456789")
    source = BACKBONES.get(backbone, about["citation"])
    others = [
        *([f"The backbone is from another paper: {source}"] * (source != about["citation"])),
        *([f"Learning from teachers: {TAUGHT}"] * bool(recipe.get("teachers"))),
        *([f"Augmentation: {TRIVIAL}"] * bool(recipe["data_args"].get("trivial"))),
    ]
    thanks = "Please cite the paper for the method, and torchcaps for the weights."
    return "\n\n".join([about["citation"], *others, thanks])


def _header(name: str, about: dict[str, Any], line: Result) -> str:
    """YAML, of which JSON is a part: values are written as JSON has them."""
    word = json.dumps
    metric = "exact_match" if several(line) else "accuracy"
    named = f", name: {word(f'{metric} with {views(line)} views of an image')}" if views(line) > 1 else ""
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
            f"    metrics: [{{type: {metric}{named}, value: {word(round(1 - line.test['error'], 6))}}}]",
            "---",
        ]
    )


def _what(about: dict[str, Any]) -> str:
    paper = find_preset(about["preset"]).paper
    plain = {word: tuple(value) if isinstance(value, list) else value for word, value in about["options"].items()}
    options = ", ".join(f"{word}={value!r}" for word, value in plain.items())
    decoder = f" and {about['decoder_parameters']:,} in its decoder" if about["decoder_parameters"] else ""
    return (
        f"The network `{about['preset']}` of torchcaps ({paper}){' with ' + options if options else ''}, trained on "
        f"{about['data']}. It takes images of {' x '.join(map(str, about['image']))} (channels, height, width) and "
        f"tells {about['classes']} classes apart: {', '.join(about['class_names'])}. It has {about['parameters']:,} "
        f"parameters{decoder}, stored in {about['dtype']}."
    )


def _use(name: str, about: dict[str, Any], line: Result, onnx: bool) -> str:
    answer = "answer.label, answer.probability"
    if several(line):
        count = about["options"].get("objects", find_preset(about["preset"]).options.get("objects"))
        longest = line.test.get("chosen_by", "longest") == "longest"
        answer = "[each.label for each in answer.found]" + f"  # the {count} highest are the answer" * longest
    code = [
        "```python",
        "from torchcaps.predictor import Predictor",
        "",
        f"predictor = Predictor.open({name!r}, threshold=0)  # this folder, from the one above it",
        'answer = predictor("image.png")  # or a list of files, Pillow images or arrays; at 0 every image gets a class',
        answer,
        "```",
    ]
    count, last = views(line), about["input"][-1]
    which = "the image and its mirror image count" if last == "mirrored()" else f"{count} views of the image count"
    sentences = [
        "The predictor scales an image to the network's size, then does what was done to test images: "
        f"{'; then '.join(f'`{step}`' for step in about['input'])}.",
        *([f"So {which}, by the sum of their probabilities."] if count > 1 else []),
        f"From a shell it is `torchcaps predict {name} IMAGE --threshold 0`.",
        f"`torchcaps.load_pretrained({name!r})` is the network alone: it takes images "
        f"[b, {', '.join(map(str, about['image']))}] after these steps{', a view of each,' if count > 1 else ''} "
        "and gives `probabilities`, `capsules` and more.",
        *(["`model.onnx` takes `images` as the network does, in batches of any size."] if onnx else []),
    ]
    return "\n\n".join([INSTALL, "\n".join(code), " ".join(sentences)])


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
