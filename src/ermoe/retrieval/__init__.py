"""Image–text retrieval: contrastive training, exact ranking under named protocols, search, zero-shot classification."""
