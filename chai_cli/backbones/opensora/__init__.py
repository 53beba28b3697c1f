"""Open-Sora 1.2: spatial and temporal attention in turns, a two-stage autoencoder, rectified flow."""
