"""Image classification: training, evaluation, few-shot probes and predictions."""
