"""What models are trained for: each task with its loss, its figures and its report."""
