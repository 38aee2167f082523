"""Every measure once more, with loops over tokens, experts and pairs, straight from its definition in words."""

import math
from itertools import product

import torch


def load_cv2(load):
    mean = sum(load) / len(load)
    return sum((x - mean) ** 2 for x in load) / len(load) / mean**2


def tail_mass(scores, threshold, top_k):
    above = sorted((s for s in scores if s > threshold), reverse=True)
    return sum(above[top_k:]) / sum(above) if above else math.nan


def margin(scores):
    best, second = sorted(scores, reverse=True)[:2]
    return best - second


def class_information(count):
    total = sum(map(sum, count))
    bits = 0.0
    for c, e in product(range(len(count)), range(len(count[0]))):
        if count[c][e]:
            expected = sum(count[c]) * sum(row[e] for row in count) / total
            bits += count[c][e] / total * math.log2(count[c][e] / expected)
    return bits


def overlap(basis):
    """Through projectors: ‖P_i P_j‖² = Σ cos² of the principal angles."""
    projectors = [u @ torch.linalg.pinv(u) for u in basis]
    pairs = [(p, q) for i, p in enumerate(projectors) for j, q in enumerate(projectors) if i != j]
    return sum(float((p @ q).square().sum()) for p, q in pairs) / len(pairs) / basis.shape[-1]


def summary(routings, *, threshold, top_k, labels=None, num_classes=0, near_zero=0.01):
    """All routing measures of a list of routings, pair by pair."""
    num_experts = routings[0].num_experts
    count, mass = [0] * num_experts, [0.0] * num_experts
    table = [[0] * num_experts for _ in range(num_classes)]
    tokens = fell_back = idle = unserved = dropped = 0
    margins, spreads, tails = [], [], []
    for number, routing in enumerate(routings):
        real = [True] * routing.num_tokens if routing.mask_T is None else routing.mask_T.tolist()
        served = set()
        pairs = zip(routing.token_A.tolist(), routing.expert_A.tolist(), routing.weight_A.tolist(), strict=True)
        for token, expert, weight in pairs:
            count[expert] += 1
            mass[expert] += weight
            idle += weight < near_zero
            served.add(token)
            if labels is not None:
                images = len(labels[number])
                table[labels[number][token * images // routing.num_tokens]][expert] += 1
        dropped += 0 if routing.num_dropped is None else int(routing.num_dropped)
        for token in range(routing.num_tokens):
            if real[token]:
                tokens += 1
                unserved += token not in served
                scores = routing.score_TE[token].tolist()
                fell_back += max(scores) < threshold
                margins.append(margin(scores))
                spreads.append(max(scores) - min(scores))
                tails.append(tail_mass(scores, threshold, top_k))
    tails = [tail for tail in tails if not math.isnan(tail)]
    return {
        "tokens": tokens,
        "load_cv2": load_cv2(count),
        "weight_cv2": load_cv2(mass),
        "max_load": max(count) / (sum(count) / num_experts),
        "fallback_rate": fell_back / tokens,
        "tail_mass": sum(tails) / len(tails) if tails else math.nan,
        "margin": sum(margins) / len(margins),
        "spread": sum(spreads) / len(spreads),
        "near_zero_rate": idle / sum(count),
        "drop_rate": dropped / (dropped + sum(count)),
        "unserved_rate": unserved / tokens,
        "class_information": class_information(table) if labels is not None else math.nan,
    }
