"""An app whose pipelines write down each run: the proofs of batches count them."""
