"""The files that weights come in: reading them, naming them, fitting them."""
