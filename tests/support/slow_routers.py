"""The rivals as loops over single tokens and experts, in float64: slow, and obvious."""

import math

import torch


def capacity_positions(expert_GSK, num_experts, kept_GSK, priority_GS=None):
    """Each proposal's place in its expert's queue, −1 if it does not queue."""
    groups, tokens, top_k = expert_GSK.shape
    position = torch.full((groups, tokens, top_k), -1)
    for g in range(groups):
        order = list(range(tokens))
        if priority_GS is not None:
            order.sort(key=lambda t, g=g: -float(priority_GS[g, t]))  # Python's sort is stable
        length = [0] * num_experts
        for k in range(top_k):
            for t in order:
                if kept_GSK[g, t, k]:
                    expert = int(expert_GSK[g, t, k])
                    position[g, t, k] = length[expert]
                    length[expert] += 1
    return position


def expert_choice(gate_GSE, places, mask_GS):
    """Combine weights (G, S, E): every expert takes its ``places[g]`` largest gates among real tokens."""
    combine = torch.zeros_like(gate_GSE)
    for g in range(len(gate_GSE)):
        real = [t for t in range(gate_GSE.shape[1]) if mask_GS[g, t]]
        for e in range(gate_GSE.shape[2]):
            for t in sorted(real, key=lambda t, g=g, e=e: -float(gate_GSE[g, t, e]))[: places[g]]:
                combine[g, t, e] = gate_GSE[g, t, e]
    return combine


def squared_variation(values):
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2


def importance(gate_SE):
    return squared_variation([float(column.sum()) for column in gate_SE.T])


def load(clean_SE, noisy_SE, sigma, top_k):
    chance_SE = []
    for clean_E, noisy_E in zip(clean_SE.tolist(), noisy_SE.tolist(), strict=True):
        threshold = sorted(noisy_E)[-top_k]
        chance_SE.append([0.5 * math.erfc((threshold - clean) / sigma / math.sqrt(2)) for clean in clean_E])
    return squared_variation([sum(column) / len(column) for column in zip(*chance_SE, strict=True)])


def gshard(gate_SE):
    num_tokens, num_experts = gate_SE.shape
    best = gate_SE.argmax(1).tolist()
    return num_experts * sum(best.count(e) / num_tokens * float(gate_SE[:, e].mean()) for e in range(num_experts))


def emoe(x_D, basis_Dr, mask_Er, gamma_r, bias_E):
    """Gates of one token: which share of its energy lies along each column, and to whom the column belongs."""
    mask_Er, gamma_r, logits = mask_Er.tolist(), gamma_r.tolist(), bias_E.tolist()
    energy = [float(x_D @ column_D) ** 2 for column_D in basis_Dr.T]
    for e in range(len(logits)):
        for r in range(len(energy)):
            part = math.exp(mask_Er[e][r]) / sum(math.exp(mask_r[r]) for mask_r in mask_Er)
            logits[e] += gamma_r[r] * part * energy[r] / sum(energy)
    return [math.exp(logit) / sum(map(math.exp, logits)) for logit in logits]


def soft_moe(x_SD, phi_DEP, scale, expert):
    """One image; ``expert(e, rows)`` runs expert e."""
    unit = [x / math.sqrt(float(x @ x) + 1e-6) for x in x_SD]
    phi_DEP = phi_DEP.detach()
    slots = [(e, p) for e in range(phi_DEP.shape[1]) for p in range(phi_DEP.shape[2])]
    logit = torch.zeros(len(x_SD), len(slots), dtype=x_SD.dtype)
    for t in range(len(x_SD)):
        for q, (e, p) in enumerate(slots):
            phi = phi_DEP[:, e, p]
            logit[t, q] = scale * (unit[t] @ phi) / math.sqrt(float(phi @ phi) + 1e-6)
    dispatch, combine = logit.softmax(0), logit.softmax(1)
    output = torch.zeros_like(x_SD)
    for q, (e, _) in enumerate(slots):
        mixed = sum(dispatch[t, q] * x_SD[t] for t in range(len(x_SD)))
        result = expert(e, mixed[None])[0]
        for t in range(len(x_SD)):
            output[t] += combine[t, q] * result
    return output


def experts_loop(experts, x_TD, weight_TE):
    """Σ_e w_e f_e(x) with one token at a time."""
    output = torch.zeros_like(x_TD)
    for t, e in (weight_TE != 0).nonzero().tolist():
        output[t] += weight_TE[t, e] * run_expert(experts, e, x_TD[t : t + 1])[0]
    return output


def run_expert(experts, e, rows):
    up, down = experts.up, experts.down
    return experts.act(rows @ up.matrices()[e] + up.bias[e]) @ down.matrices()[e] + down.bias[e]
