"""One plain training loop for every task: alone, over processes, and across interruptions."""
