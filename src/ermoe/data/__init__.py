"""Reading images from every layout people have them in, in an order and with augmentations that can be repeated."""
