"""Pages on which a model can be looked into."""
