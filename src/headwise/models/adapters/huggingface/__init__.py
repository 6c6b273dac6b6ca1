"""Hugging Face transformers models with attention computed by headwise (`pip install 'transformers>=5.18'`).

    import headwise as hw
    with hw.attach(model), hw.models.observe(callback, model=model, measures=["entropy"]):
        model(**inputs)

or, once for all models, `install()` and then `AutoModel.from_pretrained(…, attn_implementation="headwise")`.

Outputs equal those of `attn_implementation="eager"` to rounding; a fully masked query gives zeros. Keys and values are
not repeated for grouped queries. A model gets the mask of eager attention, which is computed only if the model reads
it; otherwise causal attention, windows, packed sequences and padding need no n×m mask. `output_attentions=True`, as an
argument of a call, returns `AttentionWeights`: tensors computed on first use, of the weights before dropout.
docs/models.md lists the tested models.
"""

from headwise.models.adapters.huggingface.switching import install as install
