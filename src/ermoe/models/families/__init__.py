"""One adapter a family of backbones; see `ermoe.models.backbones`."""
