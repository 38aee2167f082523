"""The slow, obvious twin of `ermoe.retrieval.figures.rank`: one query at a time, on the whole matrix."""

import torch


def slow_rank(query_QD, candidate_CD, query_group_Q, candidate_group_C):
    """(above, tied, tied before) of each query, as lists."""
    score_QC = query_QD @ candidate_CD.mT
    found = []
    for query, scores in enumerate(score_QC.tolist()):
        right = [c for c, group in enumerate(candidate_group_C.tolist()) if group == int(query_group_Q[query])]
        wrong = [c for c in range(len(scores)) if c not in right]
        best = max(scores[c] for c in right)
        first = min(c for c in right if scores[c] == best)
        above = sum(scores[c] > best for c in wrong)
        tied = [c for c in wrong if scores[c] == best]
        found.append((above, len(tied), sum(c < first for c in tied)))
    return [list(column) for column in zip(*found, strict=True)]


def as_lists(ranks):
    return [ranks.above_Q.tolist(), ranks.tied_Q.tolist(), ranks.tied_before_Q.tolist()]


def grouped(num_images, generator, *, fewest=1, most=6):
    """A map from texts to images with some captions an image, in a random order."""
    counts = torch.randint(fewest, most + 1, (num_images,), generator=generator)
    owner_T = torch.arange(num_images).repeat_interleave(counts)
    return owner_T[torch.randperm(len(owner_T), generator=generator)]
