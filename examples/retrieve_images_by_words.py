"""A CLIP with an ERMoE image tower: trained on made-up captioned images, evaluated, and searched by words.

Run: python examples/retrieve_images_by_words.py (about a minute; needs the extra "clip"; nothing is downloaded).
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from ermoe.retrieval import build_index, evaluate, predict, train
from ermoe.retrieval.index import write_hits
from ermoe.retrieval.report import write_report

torch.set_num_threads(1)  # so small a model gains nothing from more

COLOURS = ["red", "green", "blue", "yellow", "white", "purple"]
SHAPES = {"disc": "ellipse", "square": "rectangle"}
PLACES = {"left": 2, "right": 16}

# Every image shows a disc or a square of some colour, on the left or on the right; the captions say so.
data, rng, rows = Path("shapes"), np.random.default_rng(0), ["image,caption"]
data.mkdir()
for number in range(480):
    colour, (shape, method), (place, x) = (
        list(items)[rng.integers(len(items))] for items in (COLOURS, SHAPES.items(), PLACES.items())
    )
    picture = Image.fromarray(rng.integers(0, 60, (32, 32, 3), dtype=np.uint8))
    getattr(ImageDraw.Draw(picture), method)([x, 9, x + 13, 22], fill=colour)
    picture.save(data / f"{number:03d}.png")
    rows += [f"{number:03d}.png,a {colour} {shape} on the {place}", f'{number:03d}.png,"{place}: a {shape}, {colour}"']
(data / "captions.csv").write_text("\n".join(rows) + "\n")

# A hash of each image decides its split. Dev chooses the epoch; test stays unread until now.
train("tiny-ermoe", data, "run", cache=True, epochs=12, batch_size=32, base_lr=1e-2, warmup_epochs=1.0)
evaluation = evaluate("run", data)
figures, chance = evaluation.record["figures"], evaluation.record["chance"]
print(f"{evaluation.record['num_images']} test images, {evaluation.record['num_captions']} captions")
print(f"text → image R@5 {figures['t2i_r5']:.1%} (random order {chance['t2i_r5']:.1%})")
print(f"written: {write_report(evaluation, 'report.html')}")

(seen,) = predict("run", [data / "000.png"], COLOURS, templates=["a {} disc on the left"])
print(f"{seen.image} is probably {seen.classes[0]} ({seen.probabilities[0]:.0%})")

index = build_index("run", data, "index")
hits = index.search("a blue disc on the left", top=5)
for hit in hits:
    print(f"{hit.cosine:.3f}  {hit.file}")
print(f"written: {write_hits(index, 'a blue disc on the left', hits, 'found.html')}")
assert figures["t2i_r5"] > 2 * chance["t2i_r5"]
