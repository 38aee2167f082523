"""What brain age is compared with: convolutions and shifted windows."""
