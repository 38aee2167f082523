"""Every table and figure of the paper as one command: what it says, what we measure, and where the two differ."""
