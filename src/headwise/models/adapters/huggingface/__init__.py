"""Models of Hugging Face transformers with their attention computed by headwise (`pip install 'transformers>=5'`).

    import headwise as hw
    with hw.attach(model), hw.observe(callback, model=model, measures=["entropy"]):
        model(**inputs)

or, once for all models, `install()` and then `AutoModel.from_pretrained(…, attn_implementation="headwise")`.

Outputs are those of `attn_implementation="eager"` to rounding; a fully masked query gives zeros. Keys and values are
not repeated for grouped queries. A model sees the mask of eager attention, which is made only where the model computes
with it: else no n×m mask is made for causal attention, windows, packed sequences and padding.
`output_attentions=True`, as an argument of a call, gives `AttentionWeights`: tensors that are made when they are
touched, of the weights before dropout. docs/models.md says which models are tested, and for what.
"""

from headwise.models.adapters.huggingface.switching import install as install
