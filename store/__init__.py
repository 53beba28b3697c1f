"""The latent cache. Nothing is stored yet."""
