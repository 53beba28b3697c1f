"""Training of the embedded model from scratch: `python -m chai_cli.embedded.train {vae,judge,clip,dit}`."""
